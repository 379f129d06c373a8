// SPDX-License-Identifier: Apache-2.0
// From the residual to the activations of the experts that decoding rows have chosen: norm, gate and up product, SiLU.
// A block takes some outputs of one chosen expert, for all rows that chose it.
#pragma once

#include "moe.cuh"

namespace blink {

struct MoeGateArgs {
  RoutingArgs routing;
  const Bf16* weight;  // [kExperts, 2 * kSize, kK], gates first
  const Bf16* x;       // [rows, kK]
  const Bf16* norm;    // [kK]
  Bf16* out;           // [rows * kTopK, kSize]; a row's chosen experts in order
  float eps;
};

template <int kRows_, int kExperts_, int kTopK_, int kK_, int kSize_, int kWarps_, int kOutputs_, int kStages_>
struct MoeGateShape {
  static constexpr int rows = kRows_, k = kK_, size = kSize_, warps = kWarps_, outputs = kOutputs_;
  static constexpr int warp_k = k / warps, steps = warp_k / 32, turns = 2 * outputs / 8;
  static constexpr int threads = 32 * (warps + 1);
  using Ring = WeightRing<8, kK_, kStages_>;
  using Routes = Routing<kRows_, kExperts_, kTopK_>;
  static_assert(rows <= 8 && steps * 32 * warps == k && size % outputs == 0 && turns * 8 == 2 * outputs);
};

template <class S>
struct MoeGateShared {
  typename S::Ring ring;
  typename S::Routes routes;
  float sums[S::warps][S::rows][2 * S::outputs + 1], squares[S::warps][S::rows];
};

// Load a warp's activations of the rows that chose the expert, times the norm's weights. Leaves the sums of squares.
template <class S>
__device__ inline void load_inputs(const MoeGateArgs& args, int expert, int warp, Vec16 (&x)[S::steps],
                                   MoeGateShared<S>& shared) {
  const int lane = threadIdx.x % 32, row = lane / 4, k = warp * S::warp_k + lane % 4 * 8;
  const bool chosen = row < S::rows && shared.routes.has(min(row, S::rows - 1), expert);
#pragma unroll
  for (int step = 0; step < S::steps; step++)
    x[step] = chosen ? load(args.x + long(row) * S::k + k + step * 32) : Vec16{};
  float squares = 0;
#pragma unroll
  for (int step = 0; step < S::steps; step++) {
    squares += square_sum(x[step]);
    x[step] = multiply(x[step], load(args.norm + k + step * 32));
  }
  squares += __shfl_xor_sync(~0u, squares, 1);
  squares += __shfl_xor_sync(~0u, squares, 2);
  if (lane % 4 == 0 && row < S::rows) shared.squares[warp][row] = squares;
}

template <class S>
__device__ inline void multiply_gates(const MoeGateArgs& args, int expert, int warp, MoeGateShared<S>& shared) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  Vec16 x[S::steps];
  load_inputs(args, expert, warp, x, shared);
#pragma unroll 1
  for (int turn = 0; turn < S::turns; turn++) {
    shared.ring.wait_full(turn);
    float sums[2];
    multiply_rows(shared.ring.weights[turn % S::Ring::stages][0] + warp * S::warp_k, S::Ring::pitch, x, sums);
    if (row < S::rows)
      for (int i = 0; i < 2; i++) shared.sums[warp][row][turn * 8 + lane % 4 * 2 + i] = sums[i];
    shared.ring.leave(turn);
  }
}

template <class S>
__device__ inline void write_gated(const MoeGateArgs& args, int expert, const MoeGateShared<S>& shared) {
  for (int at = threadIdx.x; at < S::rows * S::outputs; at += S::threads) {
    const int row = at / S::outputs, output = at % S::outputs;
    if (!shared.routes.has(row, expert)) continue;
    float gate = 0, up = 0, squares = 0;
#pragma unroll
    for (int warp = 0; warp < S::warps; warp++) {
      gate += shared.sums[warp][row][output];
      up += shared.sums[warp][row][output + S::outputs];
      squares += shared.squares[warp][row];
    }
    const float rate = rsqrtf(squares / S::k + args.eps);
    gate *= rate;
    const long pair = row * S::Routes::top_k + shared.routes.place(row, expert);
    args.out[pair * S::size + blockIdx.x * S::outputs + output] = to_bf16(gate / (1 + __expf(-gate)) * up * rate);
  }
}

template <int kRows, int kExperts, int kTopK, int kK, int kSize, int kWarps, int kOutputs, int kStages>
__global__ void __launch_bounds__(32 * (kWarps + 1), kWarps <= 4 ? 3 : 2) moe_gate(const MoeGateArgs args) {
  using S = MoeGateShape<kRows, kExperts, kTopK, kK, kSize, kWarps, kOutputs, kStages>;
  extern __shared__ __align__(128) char memory[];
  auto& shared = *reinterpret_cast<MoeGateShared<S>*>(memory);
  const int warp = threadIdx.x / 32;

  if (threadIdx.x == 32 * kWarps) shared.ring.start(kWarps);
  for (int k = threadIdx.x * 64; k < kK; k += S::threads * 64) prefetch_line(args.norm + k);
  wait_for_prerequisites();
  // Not before: moe_down looks at the logits as soon as it starts.
  launch_dependents();
  choose_experts<false>(args.routing, shared.routes);
  if (int(blockIdx.y) >= shared.routes.count) return;
  const int expert = shared.routes.list[blockIdx.y];

  if (warp == kWarps) {
    const Bf16* weight = args.weight + (long(expert) * 2 * kSize + blockIdx.x * kOutputs) * kK;
    for (int turn = 0; turn < S::turns && threadIdx.x % 32 == 0; turn++)
      shared.ring.fill(turn, [&](int i) {
        const int in_tile = turn * 8 + i;
        return weight + long(in_tile < kOutputs ? in_tile : in_tile - kOutputs + kSize) * kK;
      });
  } else {
    multiply_gates(args, expert, warp, shared);
  }
  __syncthreads();
  write_gated(args, expert, shared);
}

}  // namespace blink
