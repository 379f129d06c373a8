// SPDX-License-Identifier: Apache-2.0
// gemm.cuh's products with FP8 weights, multiplied as they are. Activations become FP8 too, but keep bf16's precision:
// each is the sum of two numbers, the second of what the first leaves, and of each token the 128 k of a stage share a
// power of 2.
#pragma once

#include "gemm_quantized.cuh"
#include "wgmma_fp8.cuh"

namespace blink {

// As QuantizedGemmShape; a stage is a box of weights.
template <bool kGrouped_, int kTokens_, int kGroups_, int kCluster_, int kStages_, Output kOutput_, bool kNorm_>
struct Fp8GemmShape : OutputShape<kTokens_, kGroups_, kCluster_, kOutput_, kNorm_, !kGrouped_> {
  using Outputs = OutputShape<kTokens_, kGroups_, kCluster_, kOutput_, kNorm_, !kGrouped_>;
  static constexpr Format format = Format::kFp8;
  static constexpr bool grouped = kGrouped_;
  static constexpr int unit = kUnit<format>, stage_k = unit, stages = kStages_;
  static constexpr int weight_boxes = 1, weight_columns = kUnitBytes;
  // Warps that convert activations, so many together those of a stage: when the activations come, the ring has its
  // weights already, and all stages wait for these.
  static constexpr int converters = 4, together = kTokens_ == 32 ? 2 : 1;
  static constexpr int other_warps = 2 + converters;
  static constexpr int factors = kTokens_;
  static constexpr int weight_tile = Outputs::tile * kBoxRow, token_tile = Outputs::tokens * kBoxRow;
  static constexpr int stage = weight_tile + token_tile * (stage_k / kBoxRow);  // in two bytes
  static constexpr int ring_bytes = stages * stage * 2;
  static constexpr bool reuse = sizeof(Parts<Outputs>) > 8192;
  static constexpr int stage_groups = 1, pitch = Outputs::tile + 1;
  static constexpr int block_threads = Outputs::threads + 32 * other_warps;
  static constexpr int blocks = Outputs::tokens == 8 ? 4 - kGroups_ : 2;
  // Sums of a stage are added up while the next is multiplied, where registers are enough for both.
  static constexpr bool overlap = Outputs::tokens <= 16;
  static_assert(kTokens_ <= 32 && kGroups_ <= 2 && (!reuse || ring_bytes >= int(sizeof(Parts<Outputs>))));
};

template <class S>
struct Fp8GemmShared : QuantizedGemmShared<S> {};

// What is left of a number after its first part is multiplied by this, for as much range as the first part has.
constexpr float kRestFactor = 32;

// (pair - part) * kRestFactor, of f16: exact.
__device__ inline unsigned rest_of(unsigned pair, unsigned part) {
  constexpr unsigned factor = 0x50005000, minus_one = 0xbc00bc00, minus_zero = 0x80008000;
  static_assert(kRestFactor == 32);
  return fma_halves(fma_halves(part, minus_one, pair), factor, minus_zero);
}

// Four bf16, scaled, as two times four e4m3.
__device__ inline void split_quad(unsigned first, unsigned second, unsigned scale, unsigned& quad, unsigned& rest) {
  first = multiply_pairs(first, scale), second = multiply_pairs(second, scale);
  const unsigned a = to_half_pair(low_float(first), high_float(first));
  const unsigned b = to_half_pair(low_float(second), high_float(second));
  quad = to_fp8_quad(a, b);
  unsigned parts[1][2];
  unpack_half<Format::kFp8>(quad, 0, parts);
  rest = to_fp8_quad(rest_of(a, parts[0][0]), rest_of(b, parts[0][1]));
}

// The power of 2 that brings the largest of a token's numbers to 2^7, as two bf16, and its inverse. What is not finite
// makes all that it has part in NaN.
struct Fp8Scale {
  unsigned pair;
  float inverse;

  // Take the largest of the even and of the odd numbers, as bf16 without signs.
  __device__ explicit Fp8Scale(unsigned largest) {
    const unsigned found = max(largest >> 16, largest & 0xffff) >> 7, exponent = max(found, 8u);
    const unsigned scale = (261 - exponent) << 7;
    pair = scale | scale << 16;
    inverse = found == 255 ? __uint_as_float(0x7fffffff) : __uint_as_float((exponent - 7) << 23);
  }
};

// Convert a token's 128 k in their place; the eight lanes that share it take 16 each. The rows of its two boxes become
// one of first parts and one of rests, in the weights' order: quantized.cuh.
template <class S>
__device__ inline void convert_token(char* tokens, int token, float& factor) {
  constexpr int box_bytes = S::token_tile * 2;
  const int lane = threadIdx.x % 8, box = lane / 4, swizzle = token % 8;
  char* row = tokens + token * kUnitBytes;
  const char* from = row + box * box_bytes;
  // Which chunk comes first depends on the box: each of the eight lanes then reads other banks.
  const int even = lane % 4 * 2;
  const Vec16 v = *reinterpret_cast<const Vec16*>(from + ((even + box) ^ swizzle) * 16);
  const Vec16 w = *reinterpret_cast<const Vec16*>(from + ((even + 1 - box) ^ swizzle) * 16);
  const unsigned first[4] = {box ? w.x : v.x, box ? w.y : v.y, box ? w.z : v.z, box ? w.w : v.w};
  const unsigned second[4] = {box ? v.x : w.x, box ? v.y : w.y, box ? v.z : w.z, box ? v.w : w.w};
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) largest = __vmaxu2(largest, __vmaxu2(first[i] & 0x7fff7fffu, second[i] & 0x7fff7fffu));
#pragma unroll
  for (int step = 1; step < 8; step *= 2) largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, step));
  const Fp8Scale scale(largest);
  if (lane == 0) factor = scale.inverse;
  __syncwarp();  // all lanes have read
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unsigned quad, rest;
    split_quad(first[i], second[i], scale.pair, quad, rest);
    char* to = row + ((i * 2 + box) ^ swizzle) * 16 + lane % 4 * 4;
    *reinterpret_cast<unsigned*>(to) = quad;
    *reinterpret_cast<unsigned*>(to + box_bytes) = rest;
  }
}

// What each of some warps does. A slot of the ring always has the same warps: these see each phase of its barriers. A
// warp takes four tokens at once, every other one: these write to all banks. Behind the last row are zeros, which stay
// what they are.
template <class S>
__device__ inline void convert_stages(const GemmArgs& args, const GemmPlace& at, Fp8GemmShared<S>& shared) {
  const int warp = threadIdx.x / 32 - 4 * S::groups - 1, first_slot = warp / S::together;
  for (int turn = 0; turn < at.turns; turn += S::stages)
    for (int slot = first_slot; slot < S::stages && turn + slot < at.turns; slot += S::converters / S::together) {
      wait(shared.full[slot], turn / S::stages % 2);
      char* tokens = reinterpret_cast<char*>(shared.ring[slot] + S::weight_tile);
#pragma unroll 2
      for (int part = warp % S::together; part < S::tokens / 4 && part / 2 * 8 < args.output.rows;
           part += S::together) {
        const int token = part / 2 * 8 + threadIdx.x % 32 / 8 * 2 + part % 2;
        convert_token<S>(tokens, token, shared.factors[slot][token]);
      }
      fence_shared_writes();
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(shared.ready[slot]);
    }
}

// Start a stage's products: of each 8 tokens a quadruple of sums of first parts, and behind all of these, of rests.
template <class S>
__device__ inline void start_stage(int turn, Fp8GemmShared<S>& shared, float (&parts)[S::tokens]) {
  const int slot = turn % S::stages, group = threadIdx.x / 128;
  wait(shared.full[slot], turn / S::stages % 2);
  wait(shared.ready[slot], turn / S::stages % 2);
  const unsigned long long weights = describe_box(shared.ring[slot] + group * 64 * kBoxRow);
  const unsigned long long tokens = describe_box(shared.ring[slot] + S::weight_tile);
  fence_products();
  multiply_fp8<false>(parts, weights, tokens);
#pragma unroll
  for (int step = 1; step < 4; step++) multiply_fp8<true>(parts, weights + step * 2, tokens + step * 2);
  commit_products();
}

// Wait for a stage's products, but not for so many others, and add them to the sums.
template <class S, int kOthers>
__device__ inline void add_stage(const GemmPlace& at, int turn, Fp8GemmShared<S>& shared, float (&parts)[S::tokens],
                                 float (&sums)[S::tokens / 2]) {
  const int slot = turn % S::stages, lane = threadIdx.x % 32;
  float2 factors[S::tokens / 8];
#pragma unroll
  for (int i = 0; i < S::tokens / 8; i++)
    factors[i] = *reinterpret_cast<const float2*>(&shared.factors[slot][i * 8 + lane % 4 * 2]);
  float scales[2] = {1, 1};
  if constexpr (S::grouped) {
    const unsigned* words = shared.groups() + (at.stage(turn) - at.first_stage) * S::pitch;
    const int row = threadIdx.x / 32 * 16 + lane / 4;
    scales[0] = __uint_as_float(words[row]), scales[1] = __uint_as_float(words[row + 8]);
  }
  wait_for_products<kOthers>();
  keep(parts);
  __syncwarp();
  if (lane == 0 && turn + S::stages < at.turns) arrive(shared.empty[slot]);
#pragma unroll
  for (int i = 0; i < S::tokens / 2; i++) {
    float part = parts[i] + parts[i + S::tokens / 2] * (1 / kRestFactor);
    if constexpr (S::grouped) part *= scales[i / 2 % 2];
    sums[i] += part * (i % 2 ? factors[i / 4].y : factors[i / 4].x);
  }
}

template <class S>
__device__ inline void multiply_stages(const GemmArgs&, const GemmPlace& at, Fp8GemmShared<S>& shared,
                                       float (&sums)[S::tokens / 2]) {
  if constexpr (!S::overlap) {
    float parts[S::tokens];
    for (int turn = 0; turn < at.turns; turn++) {
      start_stage<S>(turn, shared, parts);
      add_stage<S, 0>(at, turn, shared, parts, sums);
    }
  } else {
    float even[S::tokens], odd[S::tokens];
    int turn = 0;
    for (; turn + 1 < at.turns; turn += 2) {
      start_stage<S>(turn, shared, even);
      start_stage<S>(turn + 1, shared, odd);
      add_stage<S, 1>(at, turn, shared, even, sums);
      add_stage<S, 0>(at, turn + 1, shared, odd, sums);
    }
    if (turn < at.turns) {
      start_stage<S>(turn, shared, even);
      add_stage<S, 0>(at, turn, shared, even, sums);
    }
  }
}

template <bool kGrouped, int kTokens, int kGroups, int kCluster, int kStages, Output kOutput, bool kNorm>
__global__ void __launch_bounds__(
    Fp8GemmShape<kGrouped, kTokens, kGroups, kCluster, kStages, kOutput, kNorm>::block_threads,
    Fp8GemmShape<kGrouped, kTokens, kGroups, kCluster, kStages, kOutput, kNorm>::blocks)
    gemm_fp8(const __grid_constant__ GemmArgs args) {
  using S = Fp8GemmShape<kGrouped, kTokens, kGroups, kCluster, kStages, kOutput, kNorm>;
  // What kernels/gpu/decode/gemm_fp8.py counts.
  constexpr int own = (kStages * 8 + 15) / 16 * 16 + kStages * kTokens * 4;
  static_assert(sizeof(Fp8GemmShared<S>) == sizeof(GemmShared<S>) + (own + 1023) / 1024 * 1024);
  static_assert(sizeof(Fp8GemmShared<S>) == sizeof(QuantizedGemmShared<S>));
  extern __shared__ __align__(1024) char memory[];
  compute_gemm<S>(args, *reinterpret_cast<Fp8GemmShared<S>*>(memory));
}

}  // namespace blink
