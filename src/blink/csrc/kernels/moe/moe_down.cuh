// SPDX-License-Identifier: Apache-2.0
// From the chosen experts' activations to the residual: down projection, weighted sum. A block takes some outputs of
// all chosen experts, one after the other.
#pragma once

#include "kernels/args.h"
#include "kernels/common/hi_lo.cuh"
#include "kernels/moe/moe.cuh"

namespace blink {

template <int kRows_, int kExperts_, int kTopK_, int kSize_, int kWarps_, int kTile_, int kStages_, FormatId kFormat_,
          bool kGrouped_>
struct MoeDownShape {
  static constexpr FormatId format = kFormat_;
  static constexpr bool grouped = kGrouped_, quantized = format != FormatId::kBf16;
  static constexpr int pieces = 16 / kBits<format>;  // of the pipeline's rows, that one of activations takes
  static constexpr int row = kSize_ / pieces, words = kRowWords<format, grouped, kSize_>;
  static constexpr int rows = kRows_, size = kSize_, warps = kWarps_, tile = kTile_;
  static constexpr int warp_k = size / warps, steps = warp_k / 32, groups = tile / 8;
  using Stages = Ring<kTile_ + kRows_ * pieces, row, kStages_>;  // behind the weights the rows' activations
  using Routes = Routing<kRows_, kExperts_, kTopK_>;
  static_assert(rows <= kMaxMoeRows && steps * 32 * warps == size && rows * tile <= 32 * (warps + 1));
  static_assert(!grouped || warp_k % kGroup == 0);
};

template <class S>
struct MoeDownShared {
  typename S::Stages pipeline;
  typename S::Routes routes;
  float sums[S::warps][S::rows][S::tile + 1];
  alignas(
      16) unsigned words[S::quantized ? S::Routes::most : 1][S::quantized ? S::words : 1][S::quantized ? S::tile : 1];
};

// Begin to copy the words of all chosen experts' weight rows, by the threads that multiply.
template <class S>
__device__ inline void start_words(const MoeDownArgs& args, MoeDownShared<S>& shared) {
  constexpr int fours = S::tile / 4, copies = S::words * fours;
  if (threadIdx.x >= 32 * S::warps) return;
  for (int i = threadIdx.x; i < shared.routes.count * copies; i += 32 * S::warps) {
    const int index = i / copies, group = i % copies / fours, four = i % fours * 4;
    const long from = (long(shared.routes.list[index]) * S::words + group) * args.n + blockIdx.x * S::tile + four;
    start_copy<16>(&shared.words[index][group][four], args.words + from);
  }
}

// Begin to fill a stage with an expert's weights; its inputs are counted already.
template <class S>
__device__ inline void copy_weights(const MoeDownArgs& args, int index, MoeDownShared<S>& shared) {
  const int lane = threadIdx.x % 32, expert = shared.routes.list[index];
  const bool chosen = lane < S::rows && shared.routes.has(min(lane, S::rows - 1), expert);
  const int num_rows = S::tile + __popc(__ballot_sync(~0u, chosen)) * S::pieces;
  if (lane == 0) shared.pipeline.begin(index, num_rows);
  __syncwarp();
  const long first = blockIdx.x * S::tile;
  if (lane == 0)
    shared.pipeline.copy_weights(index, 0, args.weight + (long(expert) * args.n + first) * S::row, S::tile);
}

template <class S>
__device__ inline void copy_inputs(const MoeDownArgs& args, int index, MoeDownShared<S>& shared) {
  const int row = threadIdx.x % 32, expert = shared.routes.list[index];
  if (row >= S::rows || !shared.routes.has(row, expert)) return;
  const long pair = row * S::Routes::top_k + shared.routes.place(row, expert);
  shared.pipeline.copy_inputs(index, S::tile + row * S::pieces, args.x + pair * S::size, S::pieces);
}

// What the copying warp does, a lane for each copy: one thread would take longer than the memory. Inputs it may copy
// only after the wait.
template <class S>
__device__ inline void copy_experts(const MoeDownArgs& args, MoeDownShared<S>& shared) {
  const int first = min(S::Stages::stages, shared.routes.count);
  for (int index = 0; index < first; index++) copy_weights<S>(args, index, shared);
  wait_for_prerequisites();
  for (int index = 0; index < shared.routes.count; index++) {
    if (index >= first) copy_weights<S>(args, index, shared);
    copy_inputs<S>(args, index, shared);
    __syncwarp();
  }
}

template <class S>
__device__ inline void multiply_experts(int warp, MoeDownShared<S>& shared) {
  const int lane = threadIdx.x % 32, row = lane / 4, k = warp * S::warp_k;
  float totals[S::groups][2] = {};
  int count = 0;  // of the row's experts
#pragma unroll 1
  for (int index = 0; index < shared.routes.count; index++) {
    const bool chosen = row < S::rows && shared.routes.has(min(row, S::rows - 1), shared.routes.list[index]);
    const float weight = chosen ? shared.routes.weights[row][count++] : 0;
    shared.pipeline.wait_full(index);
    const int slot = index % S::Stages::stages;
    const auto& stage = shared.pipeline.rows[slot];
    Vec16 x[S::steps];
#pragma unroll
    for (int i = 0; i < S::steps; i++) {
      const Bf16* from = stage[S::tile + row * S::pieces] + k + vector_k<S::format>(i);
      x[i] = chosen ? arrange<S::format>(*reinterpret_cast<const Vec16*>(from)) : Vec16{};
    }
#pragma unroll
    for (int group = 0; group < S::groups; group++) {
      float dots[2];
      if constexpr (S::quantized) {
        const unsigned* words = shared.words[index][warp * S::words / S::warps] + group * 8;
        multiply_quantized_rows<S::format, S::grouped, S::tile>(stage[group * 8] + warp * S::row / S::warps, S::row, x,
                                                                words, dots);
        dots[0] *= kActivationDivisor, dots[1] *= kActivationDivisor;
      } else {
        multiply_rows(stage[group * 8] + k, S::row, x, dots);
      }
      // Of other rows' experts not even NaN may arrive.
      for (int i = 0; i < 2; i++) totals[group][i] += chosen ? weight * dots[i] : 0;
    }
    shared.pipeline.leave(index);
  }
  if (row < S::rows)
#pragma unroll
    for (int group = 0; group < S::groups; group++)
      for (int i = 0; i < 2; i++) shared.sums[warp][row][group * 8 + lane % 4 * 2 + i] = totals[group][i];
}

// Write what the next GEMM needs of an output of this thread, a row's being those of neighbouring lanes.
template <class S>
__device__ inline void write_next(const MoeDownArgs& args, int row, int output, float value) {
  const float rounded = to_float(to_bf16(value));
  float square_sums = rounded * rounded;
#pragma unroll
  for (int step = 1; step < S::tile; step *= 2) square_sums += __shfl_xor_sync(~0u, square_sums, step);
  const float next = rounded * to_float(args.next_norm[output]), neighbour = __shfl_down_sync(~0u, next, 1);
  if (row >= S::rows) return;
  const long first = long(row) * args.n, size = long(S::rows) * args.n;
  if (args.hi_lo == FormatId::kBf16)
    args.next_x[first + output] = to_bf16(next);
  else if (output % 2 == 0 && args.hi_lo == FormatId::kFp8)
    write_columns<FormatId::kFp8>(args.next_x, size, first, output, to_bf16_pair(next, neighbour));
  else if (output % 2 == 0)
    write_columns<FormatId::kInt4>(args.next_x, size, first, output, to_bf16_pair(next, neighbour));
  if (threadIdx.x % S::tile == 0) args.next_square_sums[blockIdx.x * kMaxMoeRows + row] = square_sums;
}

template <int kRows, int kExperts, int kTopK, int kSize, int kWarps, int kTile, int kStages,
          FormatId kFormat = FormatId::kBf16, bool kGrouped = false>
__global__ void __launch_bounds__(32 * (kWarps + 1), kWarps <= 4 ? 3 : 2) moe_down(const MoeDownArgs args) {
  using S = MoeDownShape<kRows, kExperts, kTopK, kSize, kWarps, kTile, kStages, kFormat, kGrouped>;
  extern __shared__ __align__(128) char memory[];
  auto& shared = *reinterpret_cast<MoeDownShared<S>*>(memory);
  const int warp = threadIdx.x / 32;

  launch_dependents();
  if (threadIdx.x == 32 * kWarps) shared.pipeline.start(kWarps);
  // The logits are there: moe_gate, in front of this kernel, lets it start only after having waited for them.
  choose_experts<true, kWarps + 1>(args.routing, shared.routes);

  const int row = threadIdx.x / kTile, output = blockIdx.x * kTile + threadIdx.x % kTile;
  const bool active = row < kRows && args.routing.context_lens[min(row, kRows - 1)] > 0;
  Bf16* to = args.residual + long(min(row, kRows - 1)) * args.n + output;
  if (args.next_norm && threadIdx.x == 0) prefetch_line(args.next_norm + output);
  if constexpr (S::quantized) start_words<S>(args, shared);
  if (warp == kWarps) {
    copy_experts<S>(args, shared);
  } else {
    wait_for_prerequisites();
    if constexpr (S::quantized) {
      wait_for_copies();
      sync_warps<kWarps>();
    }
  }
  float value = to_float(*to);
  if (warp < kWarps) multiply_experts<S>(warp, shared);
  __syncthreads();
  if (active) {
#pragma unroll
    for (int i = 0; i < kWarps; i++) value += shared.sums[i][row][threadIdx.x % kTile];
    *to = to_bf16(value);
  }
  if (args.next_norm) write_next<S>(args, row, output, value);
}

}  // namespace blink
