// SPDX-License-Identifier: Apache-2.0
// gemm.cuh's GEMMs of weights of 4 bits with activations in bf16, for more rows than hi/lo FP8 are good for
// (gemm_hi_lo_int4.cuh). Each warpgroup makes operands of its weight rows in registers: whole numbers less the zero
// point times the scale, exact but for the rounding to bf16.
#pragma once

#include "kernels/common/quantized.cuh"
#include "kernels/gemm/gemm.cuh"

namespace blink {

// As GemmShape; a stage is one box of 256 k, two groups, with four boxes of activations.
template <int kTokens_, int kGroups_, int kCluster_, int kStages_, Output kOutput_, bool kNorm_, FormatId kWrites_>
struct Int4GemmShape : OutputShape<kTokens_, kGroups_, kCluster_, kOutput_, kNorm_, false, kWrites_> {
  using Outputs = OutputShape<kTokens_, kGroups_, kCluster_, kOutput_, kNorm_, false, kWrites_>;
  static constexpr int stage_k = kUnit<FormatId::kInt4>, stages = kStages_;
  static constexpr int weight_boxes = 1, weight_columns = kUnitBytes, other_warps = 2;
  static constexpr int weight_tile = Outputs::tile * kBoxRow, token_tile = Outputs::tokens * kBoxRow;
  static constexpr int stage = weight_tile + token_tile * (stage_k / kBoxRow);  // in two bytes
  static constexpr int pipeline_bytes = stages * stage * 2;
  static constexpr bool reuse = sizeof(Parts<Outputs>) > 8192;
  // Blocks of an SM for which registers are kept.
  static constexpr int blocks = kGroups_ == 4 ? 1 : kTokens_ <= 64 ? 4 - kGroups_ : 3 - kGroups_;
  static_assert(kGroups_ <= 4 && (!reuse || pipeline_bytes >= int(sizeof(Parts<Outputs>))));
};

template <class S>
struct Int4GemmShared : GemmShared<S> {
  uint2 words[2][S::tile];  // of a stage's groups, of each weight row: of this turn and of the next
};

// Start to copy the words of a turn's groups, of a row by each lane of half a warp; no kernel of the step writes them.
template <class S>
__device__ inline void copy_words(const GemmArgs& args, const GemmPlace& at, int turn, Int4GemmShared<S>& shared) {
  const int in_tile = threadIdx.x / 32 * 16 + threadIdx.x % 16;
  const long row = weight_row<S>(args, at, in_tile);
  const uint2* from = reinterpret_cast<const uint2*>(args.groups + row * args.num_groups) + at.stage(turn);
  if (threadIdx.x % 32 < 16 && turn < at.turns) start_copy<8>(&shared.words[turn % 2][in_tile], from);
}

// Start to multiply a group, half of a stage. Operands are made of a word while those of the word before are
// multiplied: when it returns, GEMMs of the last word alone may be under way.
template <class S>
__device__ inline void multiply_half(const Bf16* stage, int half, const RowScales& of, unsigned mask,
                                     float (&sums)[S::tokens / 2]) {
  unsigned upper[4], lower[4];
  load_half_units(stage, half, upper, lower);
  const unsigned long long tokens = describe_box(stage + S::weight_tile + half * 2 * S::token_tile);
#pragma unroll
  for (int word = 0; word < 4; word++) {
    unsigned first[4], second[4];
    dequantize_rows(upper[word], lower[word], of, mask, first, second);
    keep(first), keep(second);
    // Addresses count 16 bytes.
    const unsigned long long at = tokens + word / 2 * (S::token_tile / 8) + word % 2 * 4;
    fence_wgmma();
    multiply_rows(sums, first, at);
    multiply_rows(sums, second, at + 2);
    commit_wgmma();
    wait_for_wgmma<1>();
  }
}

template <class S>
__device__ inline void multiply_stages(const GemmArgs& args, const GemmPlace& at, Int4GemmShared<S>& shared,
                                       float (&sums)[S::tokens / 2]) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const unsigned mask = mask_of_codes(args.output.n);
  copy_words<S>(args, at, 0, shared);
  for (int turn = 0; turn < at.turns; turn++) {
    const int slot = turn % S::stages;
    wait_for_copies();
    __syncwarp();
    const uint2 upper = shared.words[turn % 2][row], lower = shared.words[turn % 2][row + 8];
    copy_words<S>(args, at, turn + 1, shared);
    wait(shared.full[slot], turn / S::stages % 2);
    multiply_half<S>(shared.pipeline[slot], 0, RowScales(upper.x, lower.x), mask, sums);
    if (threadIdx.x % 32 == 0 && turn > 0 && turn - 1 + S::stages < at.turns)
      arrive(shared.empty[(turn - 1) % S::stages]);
    multiply_half<S>(shared.pipeline[slot], 1, RowScales(upper.y, lower.y), mask, sums);
  }
  wait_for_wgmma<0>();
}

template <int kTokens, int kGroups, int kCluster, int kStages, Output kOutput, bool kNorm, FormatId kWrites>
__global__ void __launch_bounds__(128 * kGroups + 64,
                                  Int4GemmShape<kTokens, kGroups, kCluster, kStages, kOutput, kNorm, kWrites>::blocks)
    gemm_int4(const __grid_constant__ GemmArgs args) {
  using S = Int4GemmShape<kTokens, kGroups, kCluster, kStages, kOutput, kNorm, kWrites>;
  extern __shared__ __align__(1024) char memory[];
  compute_gemm<S>(args, *reinterpret_cast<Int4GemmShared<S>*>(memory));
}

}  // namespace blink
