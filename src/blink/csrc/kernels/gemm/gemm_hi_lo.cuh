// SPDX-License-Identifier: Apache-2.0
// The GEMMs of gemm.cuh, for FP8 weights with hi/lo FP8 of activations (hi_lo.cuh). Both operands come by tensor copies
// and are multiplied as they are, both at once.
#pragma once

#include "kernels/common/quantized.cuh"
#include "kernels/common/wgmma_hi_lo.cuh"
#include "kernels/gemm/gemm.cuh"

namespace blink {

constexpr int kHiLoBox = 128;  // k of a box of hi/lo FP8

// As GemmShape; a stage has so many boxes of 128 k.
template <bool kGrouped_, int kTokens_, int kGroups_, int kCluster_, int kBoxes_, int kStages_, Output kOutput_,
          bool kNorm_, FormatId kWrites_, int kInstruction_ = 0>
struct HiLoGemmShape
    : OutputShape<kTokens_, kGroups_, kCluster_, kOutput_, kNorm_, !kGrouped_, kWrites_, kInstruction_> {
  using Outputs = OutputShape<kTokens_, kGroups_, kCluster_, kOutput_, kNorm_, !kGrouped_, kWrites_, kInstruction_>;
  static constexpr bool grouped = kGrouped_;
  static constexpr int stage_k = kBoxes_ * kUnit<FormatId::kFp8>, stages = kStages_;
  static constexpr int weight_boxes = kBoxes_, weight_columns = kUnitBytes, other_warps = 2;
  static constexpr int token_boxes = stage_k / kHiLoBox;
  static constexpr int columns = kHiLo * Outputs::tokens;  // of the GEMMs
  static constexpr int instruction_columns = Outputs::tiled ? kInstruction_ : columns;
  static constexpr int weight_tile = Outputs::tile * kBoxRow, token_tile = columns * kBoxRow;
  static constexpr int stage = (weight_tile + token_tile) * kBoxes_;  // in two bytes
  static constexpr int pipeline_bytes = stages * stage * 2;
  static constexpr bool reuse = sizeof(Parts<Outputs>) > 8192;
  static constexpr int stage_groups = kBoxes_, pitch = Outputs::tile + 1;
  // Blocks of an SM for which registers are kept.
  static constexpr int most = Outputs::tokens == 8 ? 4 - kGroups_ : Outputs::tokens == 64 ? 3 - kGroups_ : 2;
  static constexpr int blocks = kGroups_ == 4 || most < 1 ? 1 : most;
  // Sums of a stage are added up while the next is multiplied, where registers are enough for both.
  static constexpr bool overlap = Outputs::tokens <= 16 ? kGroups_ <= 2 : Outputs::tokens == 32 && kGroups_ == 1;
  static_assert(kGroups_ <= 2 || Outputs::tokens <= 32);
  static_assert(!kGrouped_ || kBoxes_ == 1);  // scales of groups are applied once for each stage
  static_assert(!reuse || pipeline_bytes >= int(sizeof(Parts<Outputs>)));
};

template <class S>
struct HiLoGemmShared : GemmShared<S> {
  __device__ unsigned* groups() { return reinterpret_cast<unsigned*>(this + 1); }  // [groups of the block, S::pitch]
};

// Load the scales of the tile's groups, which no kernel of the step writes.
template <class S>
__device__ inline void prepare(const GemmArgs& args, const GemmPlace& at, HiLoGemmShared<S>& shared) {
  if constexpr (S::grouped) {
    const int count = at.turns * S::stage_groups, first = at.first_stage * S::stage_groups;
    for (int i = threadIdx.x; i < S::tile * count; i += S::threads + 32 * S::other_warps) {
      const int in_tile = i / count, group = i % count, row = weight_row<S>(args, at, in_tile);
      const bool exists = first + group < args.num_groups;
      shared.groups()[group * S::pitch + in_tile] =
          exists ? args.groups[long(row) * args.num_groups + first + group] : 0;
    }
  }
}

template <class S>
__device__ inline void copy_hi_lo(const GemmArgs& args, const GemmPlace& at, int turn, HiLoGemmShared<S>& shared) {
  const int slot = turn % S::stages;
  Bf16* to = shared.pipeline[slot] + S::weight_tile * S::weight_boxes;
#pragma unroll
  for (int part = 0; part < S::token_boxes; part++, to += S::token_tile)
    copy_box_3d(to, args.x, at.stage(turn) * S::stage_k + part * kHiLoBox, at.first_token, shared.full[slot],
                read_often_policy());
}

template <class S>
__device__ inline void copy_stages(const GemmArgs& args, const GemmPlace& at, HiLoGemmShared<S>& shared) {
  for (int turn = 0; turn < S::stages && turn < at.turns; turn++) copy_hi_lo<S>(args, at, turn, shared);
  for (int turn = S::stages; turn < at.turns; turn++) {
    wait(shared.empty[turn % S::stages], (turn / S::stages - 1) % 2);
    copy_weights<S>(args, at, turn, shared);
    copy_hi_lo<S>(args, at, turn, shared);
  }
}

// Multiply with all tokens over 32 k, by one instruction or by several.
template <class S, bool kAdd>
__device__ inline void multiply_columns(float (&parts)[S::columns / 2], unsigned long long weights,
                                        unsigned long long tokens) {
#pragma unroll
  for (int first = 0; first < S::columns; first += S::instruction_columns)
    multiply_hi_lo<kAdd>(sums_from<S::instruction_columns / 2>(parts, first / 2), weights,
                         tokens + first * kBoxRow / 8);
}

// Start a stage's GEMMs: of each 8 tokens a quadruple of sums, first the hi halves, then the lo.
template <class S>
__device__ inline void start_stage(int turn, HiLoGemmShared<S>& shared, float (&parts)[S::columns / 2]) {
  const auto [weights, tokens] = await_stage<S>(turn, shared);
  fence_wgmma();
  multiply_columns<S, false>(parts, weights, tokens);
#pragma unroll
  for (int step = 1; step < 4 * S::weight_boxes; step++) {
    const int box = step / 4, in_box = step % 4 * 2;  // tiles' addresses count 16 bytes
    multiply_columns<S, true>(parts, weights + box * S::weight_tile / 8 + in_box,
                              tokens + box * S::token_tile / 8 + in_box);
  }
  commit_wgmma();
}

// Wait for a stage's GEMMs, but not for so many others, and add them to the sums. The tensor cores keep 14 bits of
// theirs.
template <class S, int kOthers>
__device__ inline void add_stage(const GemmPlace& at, int turn, HiLoGemmShared<S>& shared,
                                 float (&parts)[S::columns / 2], float (&sums)[S::tokens / 2]) {
  constexpr int count = S::tokens / 2;
  const int lane = threadIdx.x % 32;
  float scales[2] = {1, 1};
  if constexpr (S::grouped) {
    const unsigned* words = shared.groups() + (at.stage(turn) - at.first_stage) * S::pitch;
    const int row = threadIdx.x / 32 * 16 + lane / 4;
    scales[0] = __uint_as_float(words[row]), scales[1] = __uint_as_float(words[row + 8]);
  }
  wait_for_wgmma<kOthers>();
  keep(parts);
  __syncwarp();
  if (lane == 0 && turn + S::stages < at.turns) arrive(shared.empty[turn % S::stages]);
#pragma unroll
  for (int i = 0; i < count; i++) {
    const float part = join_hi_lo(parts[i], parts[i + count]);
    sums[i] = S::grouped ? __fmaf_rn(part, scales[i / 2 % 2], sums[i]) : __fadd_rn(sums[i], part);
  }
}

template <class S>
__device__ inline void multiply_stages(const GemmArgs&, const GemmPlace& at, HiLoGemmShared<S>& shared,
                                       float (&sums)[S::tokens / 2]) {
  int turn = 0;
  if constexpr (S::overlap) {
    float even[S::columns / 2], odd[S::columns / 2];
    for (; turn + 1 < at.turns; turn += 2) {
      start_stage<S>(turn, shared, even);
      start_stage<S>(turn + 1, shared, odd);
      add_stage<S, 1>(at, turn, shared, even, sums);
      add_stage<S, 0>(at, turn + 1, shared, odd, sums);
    }
  }
  float parts[S::columns / 2];
  for (; turn < at.turns; turn++) {
    start_stage<S>(turn, shared, parts);
    add_stage<S, 0>(at, turn, shared, parts, sums);
  }
#pragma unroll
  for (int i = 0; i < S::tokens / 2; i++) sums[i] *= kHiLoDivisor;
}

template <bool kGrouped, int kTokens, int kGroups, int kCluster, int kBoxes, int kStages, Output kOutput, bool kNorm,
          FormatId kWrites>
__global__ void __launch_bounds__(
    128 * kGroups + 64,
    HiLoGemmShape<kGrouped, kTokens, kGroups, kCluster, kBoxes, kStages, kOutput, kNorm, kWrites>::blocks)
    gemm_hi_lo(const __grid_constant__ GemmArgs args) {
  using S = HiLoGemmShape<kGrouped, kTokens, kGroups, kCluster, kBoxes, kStages, kOutput, kNorm, kWrites>;
  static_assert(sizeof(HiLoGemmShared<S>) == sizeof(GemmShared<S>));  // what gemm_hi_lo.py counts
  extern __shared__ __align__(1024) char memory[];
  compute_gemm<S>(args, *reinterpret_cast<HiLoGemmShared<S>*>(memory));
}

// As gemm_in_tiles; the bits depend on kBoxes in place of kStageK.
template <int kInstruction, bool kGrouped, int kTokens, int kGroups, int kCluster, int kBoxes, int kStages,
          Output kOutput, bool kNorm, FormatId kWrites>
__global__ void __launch_bounds__(
    128 * kGroups + 64,
    HiLoGemmShape<kGrouped, kTokens, kGroups, kCluster, kBoxes, kStages, kOutput, kNorm, kWrites, kInstruction>::blocks)
    gemm_hi_lo_in_tiles(const __grid_constant__ GemmArgs args) {
  using S = HiLoGemmShape<kGrouped, kTokens, kGroups, kCluster, kBoxes, kStages, kOutput, kNorm, kWrites, kInstruction>;
  extern __shared__ __align__(1024) char memory[];
  compute_gemm<S>(args, *reinterpret_cast<HiLoGemmShared<S>*>(memory));
}

}  // namespace blink
