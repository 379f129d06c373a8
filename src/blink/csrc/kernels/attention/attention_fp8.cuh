// SPDX-License-Identifier: Apache-2.0
// Keys and values in FP8 (e4m3), two of which become f16 in one instruction. Matrices are multiplied in f16. Queries
// are divided by a constant, so that nothing overflows.
#pragma once

#include "kernels/attention/attention_shape.cuh"

namespace blink {

// The matrix instruction's column or k 0..7 is this key of eight: lanes that load together then use all banks. Of rows
// of 64 bytes neighbours do.
template <class S>
__device__ inline int permute_key(int i) {
  return S::box_row * sizeof(typename S::Cell) == 64 ? i : i / 2 + i % 2 * 4;
}

// The dims of a query that meet what a lane loads of a key: S::chunk neighbours of each four times as many.
template <class S>
struct Query {
  static constexpr int count = S::head_dim / 32;
  Vec16 parts[count];

  __device__ Query(const Bf16* from, int lane) {
#pragma unroll
    for (int i = 0; i < count; i++) {
      const int dim = i * 8 / S::chunk * 4 * S::chunk + lane % 4 * S::chunk + i * 8 % S::chunk;
      parts[i] = *reinterpret_cast<const Vec16*>(from + dim);
    }
  }
};

// Two e4m3 as f16: of the lower and of the upper half of a word.
__device__ inline void dequantize_e4m3(unsigned word, unsigned& low, unsigned& high) {
  unsigned pairs[1][2];
  dequantize_half<FormatId::kFp8>(word, 0, pairs);
  low = pairs[0][0], high = pairs[0][1];
}

// Add to the scores the product of 16 dims: the first and the last eight of a query, and of a key.
__device__ inline void multiply_key(float (&scores)[4], Vec16 first, Vec16 last, Vec16 key) {
  const unsigned queries[8] = {first.x, first.y, first.z, first.w, last.x, last.y, last.z, last.w};
  const unsigned words[4] = {key.x, key.y, key.z, key.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unsigned low, high;
    dequantize_e4m3(words[i], low, high);
    multiply_add_halves(scores, queries[2 * i], 0, queries[2 * i + 1], 0, low, high);
  }
}

// Add a tile's weighted values. Transposing moves pairs of neighbouring dims: a matrix has 16 of these, of which the
// instruction's first eight rows take the even ones and the last the odd ones.
template <class S>
__device__ inline void add_fp8_values(const Place<S>& at, Tile<S>& tile, const unsigned (&weights)[2],
                                      float (&attended)[S::head_dim / 16][4]) {
  const int key = at.lane / 8 % 2 * 8 + permute_key<S>(at.lane % 8);
#pragma unroll
  for (int dims = 0; dims < S::head_dim; dims += 32) {
    const Vec16 v = load_transposed(tile.chunk(1, key, dims / 16 + at.lane / 16));
    const unsigned words[4] = {v.x, v.y, v.z, v.w};  // keys 0 to 7 and 8 to 15 of 16 dims, then of the next
    unsigned even[4], odd[4];
#pragma unroll
    for (int i = 0; i < 4; i++) dequantize_e4m3(__byte_perm(words[i], 0, 0x3120), even[i], odd[i]);
    multiply_add_halves(attended[dims / 16], even[0], odd[0], even[1], odd[1], weights[0], weights[1]);
    multiply_add_halves(attended[dims / 16 + 1], even[2], odd[2], even[3], odd[3], weights[0], weights[1]);
  }
}

// Keep a lane's part of a query in shared memory.
template <class S>
__device__ inline void keep_query(const unsigned (&pairs)[S::dims / 2], int lane, Bf16* to) {
  constexpr float rate = 1 / kActivationDivisor;
#pragma unroll
  for (int i = 0; i < S::dims / 2; i++)
    reinterpret_cast<unsigned*>(to)[lane * S::dims / 2 + i] =
        to_half_pair(low_float(pairs[i]) * rate, high_float(pairs[i]) * rate);
}

// Keep a lane's part of a key or value, times its rate, in shared memory, and in the cache where also_to is given. What
// is too large becomes the largest number of FP8.
template <class S>
__device__ inline void keep_cells(const unsigned (&pairs)[S::dims / 2], float rate, unsigned char* to,
                                  unsigned char* also_to) {
#pragma unroll
  for (int i = 0; i < S::dims / 2; i++) {
    const unsigned short cells = to_e4m3_pair(low_float(pairs[i]) * rate, high_float(pairs[i]) * rate);
    reinterpret_cast<unsigned short*>(to)[i] = cells;
    if (also_to) reinterpret_cast<unsigned short*>(also_to)[i] = cells;
  }
}

}  // namespace blink
