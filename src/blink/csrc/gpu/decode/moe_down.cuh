// SPDX-License-Identifier: Apache-2.0
// From the chosen experts' activations to the residual: down product, weighted sum. A block takes some outputs of all
// chosen experts, one after the other.
#pragma once

#include "moe.cuh"

namespace blink {

struct MoeDownArgs {
  RoutingArgs routing;
  const Bf16* weight;  // [kExperts, n, kSize]
  const Bf16* x;       // [rows * kTopK, kSize], as moe_gate leaves it
  Bf16* residual;      // [rows, n]
  // With more rows the inputs of the next norm, as output.cuh leaves them; next_norm is null with few.
  const Bf16* next_norm;  // [n]
  Bf16* next_x;           // [rows, n]
  float* next_squares;    // [blocks, kMaxMoeRows]
  const float* scales;    // [kExperts, n], with kFp8
  int n;
};

template <int kRows_, int kExperts_, int kTopK_, int kSize_, int kWarps_, int kTile_, int kStages_, bool kFp8_>
struct MoeDownShape {
  static constexpr bool fp8 = kFp8_;
  static constexpr int bytes = fp8 ? 1 : 2;  // of a weight; a row of activations takes as many of the ring's rows
  static constexpr int halves = 2 / bytes, row = kSize_ / halves, scale_bytes = fp8 ? kTile_ * 4 : 0;
  static constexpr int rows = kRows_, size = kSize_, warps = kWarps_, tile = kTile_;
  static constexpr int warp_k = size / warps, steps = warp_k / 32, groups = tile / 8;
  using Stages = Ring<kTile_ + kRows_ * halves, row, kStages_>;  // behind the weights the rows' activations
  using Routes = Routing<kRows_, kExperts_, kTopK_>;
  static_assert(rows <= kMaxMoeRows && steps * 32 * warps == size && rows * tile <= 32 * (warps + 1));
};

template <class S>
struct MoeDownShared {
  typename S::Stages ring;
  typename S::Routes routes;
  float sums[S::warps][S::rows][S::tile + 1];
  alignas(16) float scales[S::fp8 ? S::Stages::stages : 1][S::fp8 ? S::tile : 1];
};

// Begin to fill a stage with an expert's weights; its inputs are counted already.
template <class S>
__device__ inline void copy_weights(const MoeDownArgs& args, int index, MoeDownShared<S>& shared) {
  const int lane = threadIdx.x % 32, expert = shared.routes.list[index];
  const bool chosen = lane < S::rows && shared.routes.has(min(lane, S::rows - 1), expert);
  const int num_rows = S::tile + __popc(__ballot_sync(~0u, chosen)) * S::halves;
  if (lane == 0) shared.ring.begin(index, num_rows, S::scale_bytes);
  __syncwarp();
  const long first = long(expert) * args.n + blockIdx.x * S::tile;
  for (int i = lane; i < S::tile; i += 32) shared.ring.copy_weight(index, i, args.weight + (first + i) * S::row);
  const int slot = index % S::Stages::stages;
  if (S::fp8 && lane == 0)
    copy_once(shared.scales[S::fp8 ? slot : 0], args.scales + first, S::scale_bytes, shared.ring.full[slot]);
}

template <class S>
__device__ inline void copy_inputs(const MoeDownArgs& args, int index, MoeDownShared<S>& shared) {
  const int row = threadIdx.x % 32, expert = shared.routes.list[index];
  if (row >= S::rows || !shared.routes.has(row, expert)) return;
  const long pair = row * S::Routes::top_k + shared.routes.place(row, expert);
  for (int i = 0; i < S::halves; i++)
    shared.ring.copy_input(index, S::tile + row * S::halves + i, args.x + pair * S::size + i * S::row);
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
    shared.ring.wait_full(index);
    const auto& stage = shared.ring.rows[index % S::Stages::stages];
    Vec16 x[S::steps];
#pragma unroll
    for (int i = 0; i < S::steps; i++) {
      const int place = k + vector_k<S::fp8>(i), half = place / S::row;
      const Bf16* from = stage[S::tile + row * S::halves + half] + place % S::row;
      x[i] = chosen ? *reinterpret_cast<const Vec16*>(from) : Vec16{};
    }
#pragma unroll
    for (int group = 0; group < S::groups; group++) {
      float products[2];
      if constexpr (S::fp8) {
        multiply_fp8_rows(stage[group * 8] + k / 2, S::Stages::pitch, x, products);
        const float* scales = shared.scales[index % S::Stages::stages] + group * 8 + lane % 4 * 2;
        products[0] *= scales[0] * kActivationDivisor, products[1] *= scales[1] * kActivationDivisor;
      } else {
        multiply_rows(stage[group * 8] + k, S::Stages::pitch, x, products);
      }
      // Of other rows' experts not even NaN may arrive.
      for (int i = 0; i < 2; i++) totals[group][i] += chosen ? weight * products[i] : 0;
    }
    shared.ring.leave(index);
  }
  if (row < S::rows)
#pragma unroll
    for (int group = 0; group < S::groups; group++)
      for (int i = 0; i < 2; i++) shared.sums[warp][row][group * 8 + lane % 4 * 2 + i] = totals[group][i];
}

// Write what the next product needs of an output of this thread, a row's being those of neighbouring lanes.
template <class S>
__device__ inline void write_next(const MoeDownArgs& args, int row, int output, float value) {
  const float rounded = to_float(to_bf16(value));
  float squares = rounded * rounded;
#pragma unroll
  for (int step = 1; step < S::tile; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
  if (row >= S::rows) return;
  args.next_x[long(row) * args.n + output] = to_bf16(rounded * to_float(args.next_norm[output]));
  if (threadIdx.x % S::tile == 0) args.next_squares[blockIdx.x * kMaxMoeRows + row] = squares;
}

template <int kRows, int kExperts, int kTopK, int kSize, int kWarps, int kTile, int kStages, bool kFp8 = false>
__global__ void __launch_bounds__(32 * (kWarps + 1), kWarps <= 4 ? 3 : 2) moe_down(const MoeDownArgs args) {
  using S = MoeDownShape<kRows, kExperts, kTopK, kSize, kWarps, kTile, kStages, kFp8>;
  extern __shared__ __align__(128) char memory[];
  auto& shared = *reinterpret_cast<MoeDownShared<S>*>(memory);
  const int warp = threadIdx.x / 32;

  launch_dependents();
  if (threadIdx.x == 32 * kWarps) shared.ring.start(kWarps);
  // The logits are there: moe_gate, in front of this kernel, lets it start only after having waited for them.
  choose_experts<true, kWarps + 1>(args.routing, shared.routes);

  const int row = threadIdx.x / kTile, output = blockIdx.x * kTile + threadIdx.x % kTile;
  const bool active = row < kRows && args.routing.context_lens[min(row, kRows - 1)] > 0;
  Bf16* to = args.residual + long(min(row, kRows - 1)) * args.n + output;
  if (args.next_norm && threadIdx.x == 0) prefetch_line(args.next_norm + output);
  if (warp == kWarps)
    copy_experts<S>(args, shared);
  else
    wait_for_prerequisites();
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
