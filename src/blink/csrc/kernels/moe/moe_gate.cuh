// SPDX-License-Identifier: Apache-2.0
// From the residual to the activations of the experts that decoding rows have chosen: norm, fused gate-up projection,
// SiLU. The work is cut into parts, some outputs of one expert, which blocks take in turn.
#pragma once

#include "kernels/args.h"
#include "kernels/moe/moe.cuh"

namespace blink {

template <int kRows_, int kExperts_, int kTopK_, int kK_, int kSize_, int kWarps_, int kOutputs_, int kStages_,
          FormatId kFormat_, bool kGrouped_, class Norm_>
struct MoeGateShape {
  using Norm = Norm_;  // its weights
  static constexpr FormatId format = kFormat_;
  static constexpr bool grouped = kGrouped_, quantized = format != FormatId::kBf16;
  static constexpr int row = kK_ * kBits<format> / 16, words = kRowWords<format, grouped, kK_>;  // of a weight row
  static constexpr int rows = kRows_, k = kK_, size = kSize_, warps = kWarps_, outputs = kOutputs_;
  static constexpr int warp_k = k / warps, steps = warp_k / 32, turns = 2 * outputs / 8, parts = size / outputs;
  static constexpr int run = outputs % 8 ? 4 : 8;  // of neighbouring weight rows in a stage
  using Stages = Ring<8, row, kStages_>;
  using Routes = Routing<kRows_, kExperts_, kTopK_>;
  static_assert(rows <= kMaxMoeRows && steps * 32 * warps == k && size % outputs == 0 && turns * 8 == 2 * outputs);
  static_assert(!grouped || warp_k % kGroup == 0);
};

template <class S>
struct MoeGateShared {
  typename S::Stages pipeline;
  typename S::Routes routes;
  float sums[2][S::warps][S::rows][2 * S::outputs + 1];  // of an expert and the one before
  float square_sums[S::warps][S::rows];
  alignas(16) unsigned words[S::quantized ? S::Stages::stages : 1][S::quantized ? S::words : 1][S::quantized ? 8 : 1];
};

// Load a warp's activations, times the norm's weights. Leaves the sum of squares.
template <class S>
__device__ inline void load_inputs(const MoeGateArgs& args, int warp, Vec16 (&x)[S::steps], MoeGateShared<S>& shared) {
  const int lane = threadIdx.x % 32, row = lane / 4, k = warp * S::warp_k;
#pragma unroll
  for (int i = 0; i < S::steps; i++)
    x[i] = row < S::rows ? load(args.x + long(row) * S::k + k + vector_k<S::format>(i)) : Vec16{};
  const auto* norm = static_cast<const typename S::Norm*>(args.norm);
  float square_sums = 0;
#pragma unroll
  for (int i = 0; i < S::steps; i++) {
    square_sums += square_sum(x[i]);
    x[i] = arrange<S::format>(normalize(x[i], norm + k + vector_k<S::format>(i)));
  }
  square_sums += __shfl_xor_sync(~0u, square_sums, 1);
  square_sums += __shfl_xor_sync(~0u, square_sums, 2);
  if (lane % 4 == 0 && row < S::rows) shared.square_sums[warp][row] = square_sums;
}

// Write an expert's activations for the rows that chose it; the others' sums nobody needs.
template <class S>
__device__ inline void write_gated(const MoeGateArgs& args, int work, const MoeGateShared<S>& shared,
                                   const float (&sums)[S::warps][S::rows][2 * S::outputs + 1]) {
  const int expert = shared.routes.list[work / S::parts];
  for (int at = threadIdx.x; at < S::rows * S::outputs; at += 32 * S::warps) {
    const int row = at / S::outputs, output = at % S::outputs;
    if (!shared.routes.has(row, expert)) continue;
    float gate = 0, up = 0, square_sums = 0;
#pragma unroll
    for (int warp = 0; warp < S::warps; warp++) {
      gate += sums[warp][row][output];
      up += sums[warp][row][output + S::outputs];
      square_sums += shared.square_sums[warp][row];
    }
    const float rate = rsqrtf(square_sums / S::k + args.eps);
    gate *= rate;
    const long pair = row * S::Routes::top_k + shared.routes.place(row, expert);
    const float value = silu(gate) * up * rate;
    args.out[pair * S::size + work % S::parts * S::outputs + output] =
        S::quantized ? Bf16{static_cast<unsigned short>(to_half_pair(value / kActivationDivisor, 0))} : to_bf16(value);
  }
}

template <class S>
__device__ inline void multiply_gates(const MoeGateArgs& args, int warp, MoeGateShared<S>& shared) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  Vec16 x[S::steps];
  load_inputs(args, warp, x, shared);
  float inverse = 1;
  if constexpr (S::quantized) inverse = scale_vectors(x);
  int turn = 0, buffer = 0;
  for (int work = blockIdx.x; work < shared.routes.count * S::parts; work += gridDim.x) {
    auto& sums = shared.sums[buffer];
#pragma unroll 1
    for (int first = 0; first < 2 * S::outputs; first += 8) {
      shared.pipeline.wait_full(turn);
      float dots[2];
      const int slot = turn % S::Stages::stages;
      const Bf16* weights = shared.pipeline.rows[slot][0] + warp * S::row / S::warps;
      if constexpr (S::quantized)
        multiply_quantized_rows<S::format, S::grouped, 8>(weights, S::row, x,
                                                          shared.words[slot][warp * S::words / S::warps], dots);
      else
        multiply_rows(weights, S::row, x, dots);
      if (row < S::rows)
        for (int i = 0; i < 2; i++) sums[warp][row][first + lane % 4 * 2 + i] = dots[i] * inverse;
      shared.pipeline.leave(turn++);
    }
    sync_warps<S::warps>();  // that multiply
    write_gated<S>(args, work, shared, sums);
    buffer ^= 1;
  }
}

// The weight row of one of a part's outputs, gates first, from that of its first gate on.
template <class S>
__device__ inline long row_of(int output) {
  return output < S::outputs ? output : output - S::outputs + S::size;
}

// Copy the words of a stage's weight rows, those of a run together.
template <class S>
__device__ inline void copy_words(const MoeGateArgs& args, int work, int turn, int first, MoeGateShared<S>& shared) {
  const int slot = turn % S::Stages::stages;
  const long expert = shared.routes.list[work / S::parts], from = work % S::parts * S::outputs;
  constexpr int runs = 8 / S::run;
  for (int i = threadIdx.x % 32; i < S::words * runs; i += 32) {
    const int group = i / runs, place = i % runs * S::run;
    const long row = from + row_of<S>(first + place);
    copy_once(&shared.words[slot][group][place], args.words + (expert * S::words + group) * 2 * S::size + row,
              S::run * 4, shared.pipeline.full[slot]);
  }
}

// What the copying warp does, a lane for each of a stage's runs of neighbouring weight rows.
template <class S>
__device__ inline void copy_gates(const MoeGateArgs& args, MoeGateShared<S>& shared) {
  const int lane = threadIdx.x % 32;
  int turn = 0;
  for (int work = blockIdx.x; work < shared.routes.count * S::parts; work += gridDim.x) {
    const long expert = shared.routes.list[work / S::parts];
    const long first_row = expert * 2 * S::size + work % S::parts * S::outputs;
    for (int first = 0; first < 2 * S::outputs; first += 8, turn++) {
      if (lane == 0) shared.pipeline.begin(turn, 8, S::words * 32);
      __syncwarp();
      if (lane < 8 / S::run) {
        const Bf16* from = args.weight + (first_row + row_of<S>(first + lane * S::run)) * S::row;
        shared.pipeline.copy_weights(turn, lane * S::run, from, S::run);
      }
      if constexpr (S::quantized) copy_words<S>(args, work, turn, first, shared);
      __syncwarp();
    }
  }
}

template <int kRows, int kExperts, int kTopK, int kK, int kSize, int kWarps, int kOutputs, int kStages, int kBlocks,
          FormatId kFormat = FormatId::kBf16, bool kGrouped = false, class Norm = Bf16>
__global__ void __launch_bounds__(32 * (kWarps + 1), kBlocks) moe_gate(const MoeGateArgs args) {
  using S = MoeGateShape<kRows, kExperts, kTopK, kK, kSize, kWarps, kOutputs, kStages, kFormat, kGrouped, Norm>;
  extern __shared__ __align__(128) char memory[];
  auto& shared = *reinterpret_cast<MoeGateShared<S>*>(memory);
  const int warp = threadIdx.x / 32;

  if (threadIdx.x == 32 * kWarps) shared.pipeline.start(kWarps);
  constexpr int line = 128 / sizeof(Norm);
  for (int k = threadIdx.x * line; k < kK; k += blockDim.x * line)
    prefetch_line(static_cast<const Norm*>(args.norm) + k);
  wait_for_prerequisites();
  choose_experts<false, kWarps + 1>(args.routing, shared.routes);
  // Not before: moe_down looks at the logits as soon as it starts, and who asks for them together waits longer.
  launch_dependents();
  if (warp < kWarps)
    multiply_gates<S>(args, warp, shared);
  else
    copy_gates<S>(args, shared);
}

}  // namespace blink
