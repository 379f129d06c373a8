// SPDX-License-Identifier: Apache-2.0
// gemv_quantized.cuh's products with weights of 4 bits, in whole numbers: weights need but a mask. Of each group of k a
// row's activations are numbers of 16 bits with a scale of their own, so as exact as bf16, cut into halves of 8: the
// first are rows 0 to 7 of the matrix instruction, the second its rows 8 to 15.
#pragma once

#include "gemv_quantized.cuh"

namespace blink {

// As QuantizedGemvShape.
template <int kRows_, int kK_, int kWarps_, int kCluster_, int kSlices_, int kTile_, int kStageRows_, int kStages_,
          Output kOutput_, bool kNorm_>
struct Int4GemvShape : QuantizedGemvShape<Format::kInt4, true, kRows_, kK_, kWarps_, kCluster_, kSlices_, kTile_,
                                          kStageRows_, kStages_, kOutput_, kNorm_> {
  using Base = QuantizedGemvShape<Format::kInt4, true, kRows_, kK_, kWarps_, kCluster_, kSlices_, kTile_, kStageRows_,
                                  kStages_, kOutput_, kNorm_>;
  static constexpr int chunks = Base::steps * 2;            // groups of k that a warp has of each slice
  static constexpr int columns = Base::group == 1 ? 1 : 2;  // of a lane's sums, those that count
  static_assert(Base::folded);
};

template <class S>
struct Int4GemvShared : QuantizedGemvShared<S> {};

template <class S>
struct Int4Activations {
  unsigned values[S::chunks][4][4];  // of each word: the first halves and the second, those of 8 k further likewise
  float scales[S::chunks];
  int sums[S::chunks];
};

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

// Make whole numbers of a group's activations, which four lanes share. What is not finite makes the scale so.
template <class S>
__device__ inline void cut_group(const unsigned (&pairs)[16], int chunk, Int4Activations<S>& to) {
  unsigned largest = 0, sum = 0;
#pragma unroll
  for (const unsigned pair : pairs) largest = __vmaxu2(largest, pair & 0x7fff7fffu);
  largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, 2));
  const float most = fmaxf(__uint_as_float(max(largest >> 16, largest & 0xffff) << 16), 1e-30f);
  const bool is_finite = max(largest >> 16, largest & 0xffff) < 0x7f80;
  const float factor = kLargestWhole / most;
#pragma unroll
  for (int word = 0; word < 4; word++)
#pragma unroll
    for (int further = 0; further < 2; further++)
      cut(pairs[word * 4 + further], pairs[word * 4 + 2 + further], factor, to.values[chunk][word][further * 2],
          to.values[chunk][word][further * 2 + 1], sum);
  int whole = int(sum - 32 * __float_as_uint(kWhole));
  whole += __shfl_xor_sync(~0u, whole, 1);
  to.sums[chunk] = whole + __shfl_xor_sync(~0u, whole, 2);
  to.scales[chunk] = is_finite ? most / kLargestWhole : __uint_as_float(0x7fc00000);
}

// As load_words(), in whole numbers.
template <class S>
__device__ inline void load_whole(const GemvArgs& args, int first_k, int warp, Int4Activations<S>& to,
                                  GemvShared<S>& shared) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  const int k = first_k + row / S::slots * S::unit + lane % 4 * 2;
  const Bf16* from = args.x + long(min(row % S::slots, S::rows - 1)) * S::k;
  const auto place = [&](int chunk, int i) { return k + chunk / 2 * S::span + chunk % 2 * kGroup + i * 8; };
  unsigned pairs[S::chunks][16];
#pragma unroll
  for (int chunk = 0; chunk < S::chunks; chunk++)
#pragma unroll
    for (int i = 0; i < 16; i++) pairs[chunk][i] = load_pair(from + place(chunk, i));
  if constexpr (S::norm) {
    float squares = 0;
#pragma unroll
    for (int chunk = 0; chunk < S::chunks; chunk++)
#pragma unroll
      for (int i = 0; i < 16; i++) {
        unsigned& pair = pairs[chunk][i];
        squares += square_sum(pair);
        pair = multiply_pairs(pair, *reinterpret_cast<const unsigned*>(args.norm + place(chunk, i)));
      }
    keep_squares<S>(squares, warp, shared);
  }
#pragma unroll
  for (int chunk = 0; chunk < S::chunks; chunk++) cut_group<S>(pairs[chunk], chunk, to);
}

__device__ inline void multiply_add_bytes(int (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// As multiply_units() of 8 bits.
template <class S>
__device__ inline void multiply_units(const Bf16* weights, const Int4Activations<S>& x, int warp, int in_tile,
                                      Int4GemvShared<S>& shared) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  const char* from =
      reinterpret_cast<const char*>(weights + row % S::group * S::pitch) + row / S::group * kUnitBytes + lane % 4 * 32;
  const auto column = [&](int i) { return S::group == 1 ? row : lane % 4 * 2 + i; };
  float totals[S::columns] = {};
#pragma unroll
  for (int chunk = 0; chunk < S::chunks; chunk++) {
    const Vec16 v = *reinterpret_cast<const Vec16*>(from + chunk / 2 * S::slices * kUnitBytes + chunk % 2 * 16);
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
    int sums[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++)
      multiply_add_bytes(sums, x.values[chunk][i], words[i] & 0x0f0f0f0fu, words[i] >> 4 & 0x0f0f0f0fu);
#pragma unroll
    for (int i = 0; i < S::columns; i++) {
      const bool second = S::group == 1 ? row % 2 : i;
      const int group = (warp * S::steps + chunk / 2) * S::slices + column(i) / S::group;
      const unsigned word = shared.groups[in_tile + column(i) % S::group][group * 2 + chunk % 2];
      const int whole = (second ? sums[1] : sums[0]) * 256 + (second ? sums[3] : sums[2]);
      const int zero = word >> 16 & 0x7f;  // the bf16's last bits
      totals[i] += float(whole - zero * x.sums[chunk]) * (group_scale<Format::kInt4>(word) * x.scales[chunk]);
    }
  }
  const int slice = row / S::slots, token = row % S::slots;
#pragma unroll
  for (int i = 0; i < S::columns; i++)
    if (column(i) / S::group == slice && column(i) / 2 == lane % 4 && token < S::rows)
      shared.sums[warp * S::slices + slice][token][in_tile + column(i) % S::group] = totals[i];
}

template <class S>
__device__ inline void multiply_weights(const GemvArgs& args, int rank, int warp, Int4GemvShared<S>& shared) {
  const int warp_k = warp * S::steps * S::span, warp_bytes = S::block_bytes / S::warps;
  Int4Activations<S> x;
  load_whole<S>(args, rank * S::block_k + warp_k, warp, x, shared);
  walk_ring<S>(shared, [&](const Bf16* weights, int in_tile) {
    multiply_units<S>(weights + warp * (warp_bytes / 2), x, warp, in_tile, shared);
  });
}

// Blocks of a multiprocessor for which registers are kept.
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
