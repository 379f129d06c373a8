// SPDX-License-Identifier: Apache-2.0
// The GEMMs of gemv_quantized.cuh with weights of 4 bits, in whole numbers: weights need but a mask. Of each group of k
// a row's activations are numbers of 16 bits with a scale of their own, so as exact as bf16. They are cut into halves
// of 8 bits. The first halves are rows 0 to 7 of the matrix instruction, the second ones its rows 8 to 15.
#pragma once

#include "kernels/gemm/gemv_quantized.cuh"

namespace blink {

// As QuantizedGemvShape.
template <int kRows_, int kK_, int kWarps_, int kCluster_, int kSlices_, int kTile_, int kStageRows_, int kStages_,
          Output kOutput_, bool kNorm_>
struct Int4GemvShape : QuantizedGemvShape<FormatId::kInt4, true, kRows_, kK_, kWarps_, kCluster_, kSlices_, kTile_,
                                          kStageRows_, kStages_, kOutput_, kNorm_> {
  using Base = QuantizedGemvShape<FormatId::kInt4, true, kRows_, kK_, kWarps_, kCluster_, kSlices_, kTile_, kStageRows_,
                                  kStages_, kOutput_, kNorm_>;
  static constexpr int chunks = Base::steps * 2;            // groups of k that a warp has of each slice
  static constexpr int columns = Base::group == 1 ? 1 : 2;  // of a lane's sums, those that count
  static constexpr int walk = Base::group * (kStageRows_ % (Base::group * 2) == 0 ? 2 : 1);
  // Whole rows are not padded against bank conflicts: neighbours come by one copy.
  static constexpr int pitch = Base::block_bytes / 2 + (Base::group > 1 && kCluster_ > 1 ? 8 : 0);
  static constexpr int warp_k = Base::steps * Base::span, warp_groups = warp_k / kGroup;
  static constexpr int pieces = warp_k / 16, passes = (pieces + 31) / 32;  // a lane cuts a piece at once
  static_assert(Base::folded && (pieces < 32 || pieces % 32 == 0));
};

struct Int4Group {  // of a row's activations
  float scale;
  int sum;
};

template <class S>
struct Int4GemvShared : QuantizedGemvShared<S> {
  // Of one row at a time, registers that lane q of four has of each 32 k; padded against bank conflicts. Before, each
  // piece has there the norm's weights.
  alignas(16) unsigned whole[S::warps][4][S::warp_k / 32 + 1][4];
  Int4Group of_row[S::warps][S::warp_groups];

  __device__ uint2* halves(int warp, int piece, int lane) {
    return reinterpret_cast<uint2*>(&whole[warp][lane][piece / 2][piece % 2 * 2]);
  }
};

template <class S>
struct Int4Activations {
  unsigned values[S::chunks][4][4];  // of each word: the first halves and the second, those of 8 k further likewise
  Int4Group groups[S::chunks];
};

// The piece that a lane cuts in a pass: 8 activations, and 8 from 16 k further on, of which four lanes have a register
// each. Where a warp has fewer pieces than lanes, two lanes cut the same.
template <class S>
__device__ inline int piece_of(int pass) {
  return pass * 32 + threadIdx.x % 32 % S::pieces;
}

template <class S>
__device__ inline int place_of_piece(int pass) {
  return piece_of<S>(pass) / 2 * 32 + piece_of<S>(pass) % 2 * 8;
}

// Start copies of what no kernel of the step writes: the words of the tile's groups, and of the norm's weights those
// that this thread itself reads.
template <class S>
__device__ inline void prepare(const GemvArgs& args, int tile, int rank, Int4GemvShared<S>& shared) {
  if (threadIdx.x >= 32 * S::warps) return;
  constexpr int words = S::groups % 4 == 0 ? 4 : 1, copies = S::groups / words;
  const int first = min(tile * S::outputs, args.n - S::outputs);
  for (int at = threadIdx.x; at < S::tile * copies; at += 32 * S::warps) {
    const int in_tile = at / copies, group = at % copies * words;
    const int row = first + (in_tile < S::outputs ? in_tile : in_tile - S::outputs + args.n);
    start_copy<words * 4>(&shared.groups[in_tile][group],
                          args.groups + long(row) * (S::k / kGroup) + rank * S::groups + group);
  }
  if constexpr (S::norm) {
    const int warp = threadIdx.x / 32;
    const Bf16* from = norm_of<S>(args) + rank * S::block_k + warp * S::warp_k;
#pragma unroll
    for (int pass = 0; pass < S::passes; pass++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        start_copy<8>(shared.halves(warp, piece_of<S>(pass), i),
                      from + place_of_piece<S>(pass) + i / 2 * 16 + i % 2 * 4);
  }
}

constexpr float kLargestWhole = 32512;  // whose first half is 127
constexpr float kWhole = 12582912;      // 1.5 * 2^23: in a float's bits what is added to it is a whole number

// Cut four activations, times the factor, into halves; add them to the sum.
__device__ inline void cut(unsigned even, unsigned odd, float factor, unsigned& first, unsigned& second,
                           unsigned& sum) {
  unsigned whole[4] = {
      __float_as_uint(fmaf(low_float(even), factor, kWhole)), __float_as_uint(fmaf(low_float(odd), factor, kWhole)),
      __float_as_uint(fmaf(high_float(even), factor, kWhole)), __float_as_uint(fmaf(high_float(odd), factor, kWhole))};
  second = __byte_perm(__byte_perm(whole[0], whole[1], 0x40), __byte_perm(whole[2], whole[3], 0x40), 0x5410);
#pragma unroll
  for (unsigned& number : whole) sum += number, number += 128;  // the second halves have signs
  first = __byte_perm(__byte_perm(whole[0], whole[1], 0x51), __byte_perm(whole[2], whole[3], 0x51), 0x5410);
}

// Make whole numbers of a piece; eight lanes share a group. What is not finite makes the scale so.
template <class S>
__device__ inline void cut_piece(const unsigned (&pairs)[8], int piece, int warp, Int4GemvShared<S>& shared) {
  unsigned largest = 0, sum = 0;
#pragma unroll
  for (const unsigned pair : pairs) largest = __vmaxu2(largest, pair & 0x7fff7fffu);
#pragma unroll
  for (int step = 1; step < 8; step *= 2) largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, step));
  largest = max(largest >> 16, largest & 0xffff);
  const float most = fmaxf(__uint_as_float(largest << 16), 1e-30f), factor = __fdividef(kLargestWhole, most);
#pragma unroll
  for (int lane = 0; lane < 4; lane++) {
    uint2 halves;
    cut(pairs[lane], pairs[4 + lane], factor, halves.x, halves.y, sum);
    *shared.halves(warp, piece, lane) = halves;
  }
  int whole = int(sum - 16 * __float_as_uint(kWhole));
#pragma unroll
  for (int step = 1; step < 8; step *= 2) whole += __shfl_xor_sync(~0u, whole, step);
  const float scale = largest < 0x7f80 ? most * (1 / kLargestWhole) : __uint_as_float(0x7fc00000);
  if (piece % 8 == 0) shared.of_row[warp][piece / 8] = {scale, whole};
}

// A lane's pieces of a row, and of the norm.
template <class S>
struct Int4Pieces {
  unsigned pairs[S::passes][8];

  __device__ void load_row(const Bf16* from) {
#pragma unroll
    for (int pass = 0; pass < S::passes; pass++)
#pragma unroll
      for (int i = 0; i < 2; i++) to_words(load(from + place_of_piece<S>(pass) + i * 16), pairs[pass] + 4 * i);
  }

  __device__ void load_norm(int warp, Int4GemvShared<S>& shared) {
#pragma unroll
    for (int pass = 0; pass < S::passes; pass++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint2 words = *shared.halves(warp, piece_of<S>(pass), i);
        pairs[pass][i * 2] = words.x, pairs[pass][i * 2 + 1] = words.y;
      }
  }

  // Multiply by the norm's weights; return the warp's sum of squares before.
  __device__ float normalize(const Int4Pieces& norm) {
    float square_sums = 0;
#pragma unroll
    for (int pass = 0; pass < S::passes; pass++)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        square_sums += square_sum(pairs[pass][i]);
        pairs[pass][i] = multiply_pairs(pairs[pass][i], norm.pairs[pass][i]);
      }
#pragma unroll
    for (int step = 1; step < 32 && step < S::pieces; step *= 2) square_sums += __shfl_xor_sync(~0u, square_sums, step);
    return square_sums;
  }
};

// Take the row in shared memory, as the matrix instruction takes it.
template <class S>
__device__ inline void take_row(int warp, const Int4GemvShared<S>& shared, Int4Activations<S>& to) {
  const int lane = threadIdx.x % 32, slice = lane / 4 / S::slots;
#pragma unroll
  for (int chunk = 0; chunk < S::chunks; chunk++) {
    const int group = (chunk / 2 * S::slices + slice) * 2 + chunk % 2;
#pragma unroll
    for (int word = 0; word < 4; word++)
      to_words(*reinterpret_cast<const Vec16*>(shared.whole[warp][lane % 4][group * 4 + word]), to.values[chunk][word]);
    to.groups[chunk] = shared.of_row[warp][group];
  }
}

// Load a warp's activations, times the norm's weights, in whole numbers. Leaves each row's sum of squares.
template <class S>
__device__ inline void load_whole(const GemvArgs& args, int first_k, int warp, Int4Activations<S>& to,
                                  Int4GemvShared<S>& shared) {
  Int4Pieces<S> rows[S::rows], norm;
#pragma unroll
  for (int row = 0; row < S::rows; row++) rows[row].load_row(args.x + long(row) * S::k + first_k);
  wait_for_copies();
  if constexpr (S::norm) norm.load_norm(warp, shared);
  __syncwarp();
#pragma unroll
  for (int row = 0; row < S::rows; row++) {
    if constexpr (S::norm) {
      const float square_sums = rows[row].normalize(norm);
      if (threadIdx.x % 32 == 0) shared.square_sums[warp][row] = square_sums;
    }
#pragma unroll
    for (int pass = 0; pass < S::passes; pass++) cut_piece<S>(rows[row].pairs[pass], piece_of<S>(pass), warp, shared);
    __syncwarp();
    if (row == 0 || threadIdx.x % 32 / 4 % S::slots == row) take_row<S>(warp, shared, to);
    if (row + 1 < S::rows) __syncwarp();
  }
}

// Where a lane finds and leaves what belongs to its columns of the GEMMs, in the first group of weight rows.
template <class S>
struct Int4Places {
  int weights;            // in bytes, of a group of weight rows
  const unsigned* words;  // of the columns' groups of k
  float* sums;            // null where nobody reads them

  __device__ Int4Places(int warp, Int4GemvShared<S>& shared) {
    const int lane = threadIdx.x % 32, row = lane / 4, slice = row / S::slots, token = row % S::slots;
    const int column = S::columns == 1 ? row : lane % 4 * 2, first_slice = warp * S::steps * S::slices;
    weights = (row % S::group * S::pitch + warp * (S::block_bytes / S::warps / 2)) * 2 + row / S::group * kUnitBytes +
              lane % 4 * 32;
    words = &shared.groups[column % S::group][(first_slice + column / S::group) * 2];
    const bool counts = column / S::group == slice && column / 2 == lane % 4 && token < S::rows;
    sums = counts ? &shared.sums[warp * S::slices + slice][token][column % S::group] : nullptr;
  }
};

// As multiply_units() of 8 bits, of several groups of weight rows: their chains of instructions overlap.
template <class S>
__device__ inline void multiply_units(const Bf16* weights, const Int4Activations<S>& x, const Int4Places<S>& places,
                                      int in_tile) {
  constexpr int count = S::walk / S::group;
  const char* from = reinterpret_cast<const char*>(weights) + places.weights;
  const unsigned* groups = places.words + in_tile * S::groups;
  float totals[count][S::columns] = {};
#pragma unroll
  for (int chunk = 0; chunk < S::chunks; chunk++) {
    int sums[count][4] = {};
#pragma unroll
    for (int part = 0; part < count; part++) {
      const int offset = part * S::group * S::pitch * 2 + chunk / 2 * S::slices * kUnitBytes + chunk % 2 * 16;
      unsigned words[4];
      to_words(*reinterpret_cast<const Vec16*>(from + offset), words);
#pragma unroll
      for (int i = 0; i < 4; i++)
        multiply_add_bytes(sums[part], x.values[chunk][i], words[i] & 0x0f0f0f0fu, words[i] >> 4 & 0x0f0f0f0fu);
    }
#pragma unroll
    for (int part = 0; part < count; part++)
#pragma unroll
      for (int i = 0; i < S::columns; i++) {
        // Of one column a lane, the odd ones are the second of those that it has.
        const bool second = S::columns == 1 ? threadIdx.x / 4 % 2 : i;
        const unsigned word = groups[(part * S::group + i) * S::groups + chunk / 2 * S::slices * 2 + chunk % 2];
        const int whole = (second ? sums[part][1] : sums[part][0]) * 256 + (second ? sums[part][3] : sums[part][2]);
        const int zero = word >> 16 & 0x7f;  // the bf16's last bits
        totals[part][i] +=
            float(whole - zero * x.groups[chunk].sum) * (group_scale<FormatId::kInt4>(word) * x.groups[chunk].scale);
      }
  }
  if (!places.sums) return;
#pragma unroll
  for (int part = 0; part < count; part++)
#pragma unroll
    for (int i = 0; i < S::columns; i++) places.sums[in_tile + part * S::group + i] = totals[part][i];
}

template <class S>
__device__ inline void multiply_weights(const GemvArgs& args, int rank, int warp, Int4GemvShared<S>& shared) {
  Int4Activations<S> x;
  load_whole<S>(args, rank * S::block_k + warp * S::warp_k, warp, x, shared);
  sync_warps<S::warps>();  // all have waited for their copies of groups
  const Int4Places<S> places(warp, shared);
  walk_pipeline<S>(shared, [&](const Bf16* weights, int in_tile) { multiply_units<S>(weights, x, places, in_tile); });
}

// Blocks of an SM for which registers are kept.
template <int kWarps>
constexpr int kInt4Blocks = kWarps <= 2   ? 6
                            : kWarps <= 4 ? 4
                                          : 2;

template <int kRows, int kK, int kWarps, int kCluster, int kSlices, int kTile, int kStageRows, int kStages,
          Output kOutput, bool kNorm>
__global__ void __launch_bounds__(32 * (kWarps + 1), kInt4Blocks<kWarps>) gemv_int4(const GemvArgs args) {
  using S = Int4GemvShape<kRows, kK, kWarps, kCluster, kSlices, kTile, kStageRows, kStages, kOutput, kNorm>;
  extern __shared__ __align__(1024) char memory[];
  compute_gemv<S>(args, *reinterpret_cast<Int4GemvShared<S>*>(memory));
}

}  // namespace blink
