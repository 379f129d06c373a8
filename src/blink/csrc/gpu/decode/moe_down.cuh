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
  int n;
};

template <int kRows_, int kExperts_, int kTopK_, int kSize_, int kWarps_, int kTile_, int kStages_>
struct MoeDownShape {
  static constexpr int rows = kRows_, size = kSize_, warps = kWarps_, tile = kTile_;
  static constexpr int warp_k = size / warps, steps = warp_k / 32, groups = tile / 8;
  using Ring = WeightRing<kTile_, kSize_, kStages_>;
  using Routes = Routing<kRows_, kExperts_, kTopK_>;
  static_assert(rows <= 8 && steps * 32 * warps == size && rows * tile <= 32 * (warps + 1));
};

template <class S>
struct MoeDownShared {
  typename S::Ring ring;
  typename S::Routes routes;
  float sums[S::warps][S::rows][S::tile + 1];
};

template <class S>
struct ExpertInput {  // a lane's activations of the row lane / 4, and their weight; zeros if it has not chosen the
                      // expert
  Vec16 x[S::steps];
  float weight;
};

// Load what the row has for the next expert; its experts so far are counted.
template <class S>
__device__ inline void load_input(const MoeDownArgs& args, const typename S::Routes& routes, int index, int warp,
                                  int& count, ExpertInput<S>& to) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  const bool chosen = index < routes.count && row < S::rows && routes.has(min(row, S::rows - 1), routes.list[index]);
  const Bf16* from = args.x + long(row * S::Routes::top_k + count) * S::size + warp * S::warp_k + lane % 4 * 8;
#pragma unroll
  for (int step = 0; step < S::steps; step++) to.x[step] = chosen ? load(from + step * 32) : Vec16{};
  to.weight = chosen ? routes.weights[row][count] : 0;
  count += chosen;
}

template <class S>
__device__ inline void multiply_experts(const MoeDownArgs& args, int warp, MoeDownShared<S>& shared) {
  const int lane = threadIdx.x % 32, row = lane / 4, num_experts = shared.routes.count;
  float totals[S::groups][2] = {};
  ExpertInput<S> now, next;
  int count = 0;
  load_input<S>(args, shared.routes, 0, warp, count, now);
#pragma unroll 1
  for (int index = 0; index < num_experts; index++) {
    load_input<S>(args, shared.routes, index + 1, warp, count, next);
    shared.ring.wait_full(index);
#pragma unroll
    for (int group = 0; group < S::groups; group++) {
      const Bf16* weights = shared.ring.weights[index % S::Ring::stages][group * 8] + warp * S::warp_k;
      float sums[2];
      multiply_rows(weights, S::Ring::pitch, now.x, sums);
      for (int i = 0; i < 2; i++) totals[group][i] += now.weight != 0 ? now.weight * sums[i] : 0;
    }
    shared.ring.leave(index);
    now = next;
  }
  if (row < S::rows)
#pragma unroll
    for (int group = 0; group < S::groups; group++)
      for (int i = 0; i < 2; i++) shared.sums[warp][row][group * 8 + lane % 4 * 2 + i] = totals[group][i];
}

template <int kRows, int kExperts, int kTopK, int kSize, int kWarps, int kTile, int kStages>
__global__ void __launch_bounds__(32 * (kWarps + 1), kWarps <= 4 ? 3 : 2) moe_down(const MoeDownArgs args) {
  using S = MoeDownShape<kRows, kExperts, kTopK, kSize, kWarps, kTile, kStages>;
  extern __shared__ __align__(128) char memory[];
  auto& shared = *reinterpret_cast<MoeDownShared<S>*>(memory);
  const int warp = threadIdx.x / 32;

  launch_dependents();
  if (threadIdx.x == 32 * kWarps) shared.ring.start(kWarps);
  // The logits are there: moe_gate, in front of this kernel, lets it start only after having waited for them.
  choose_experts<true>(args.routing, shared.routes);

  const int row = threadIdx.x / kTile;
  const bool writes = row < kRows && args.routing.context_lens[min(row, kRows - 1)] > 0;
  Bf16* to = args.residual + long(row) * args.n + blockIdx.x * kTile + threadIdx.x % kTile;
  float value = 0;
  if (warp == kWarps) {
    const Bf16* weight = args.weight + long(blockIdx.x) * kTile * kSize;
    for (int turn = 0; turn < shared.routes.count && threadIdx.x % 32 == 0; turn++)
      shared.ring.fill(turn, [&](int i) { return weight + (long(shared.routes.list[turn]) * args.n + i) * kSize; });
    __syncwarp();
  }
  wait_for_prerequisites();
  if (writes) value = to_float(*to);
  if (warp < kWarps) multiply_experts(args, warp, shared);
  __syncthreads();
  if (!writes) return;
#pragma unroll
  for (int i = 0; i < kWarps; i++) value += shared.sums[i][row][threadIdx.x % kTile];
  *to = to_bf16(value);
}

}  // namespace blink
