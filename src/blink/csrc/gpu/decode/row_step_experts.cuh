// SPDX-License-Identifier: Apache-2.0
// Experts of row_step.cuh: every block finds out from the router's logits which the row has chosen, and takes its part
// of each of them. Before that is known, the memory brings the next layer's first matrices to L2.
#pragma once

#include "moe_routing.cuh"
#include "row_step_input.cuh"
#include "row_step_products.cuh"

namespace blink {

// Let a warp choose, from the words of the logits: lane l looks at experts from l * kExperts / 32 on.
template <class S>
__device__ inline void choose(const RowStepArgs& args, unsigned tag, RowStepShared<S>& shared) {
  constexpr int each = S::experts / 32, pairs = each / 2;
  static_assert(each % 2 == 0);
  const int lane = threadIdx.x % 32;
  unsigned keys[each], largest = 0, before = 0, mine = 0;
  Word words[pairs][1];
  await_words(words, tag, [&](int i) { return args.words + S::of_logits + lane * pairs + i; });
#pragma unroll
  for (int i = 0; i < pairs; i++) {
    keys[i * 2] = routing_key(unsigned(words[i][0]) & 0xffff, lane * each + i * 2);
    keys[i * 2 + 1] = routing_key(unsigned(words[i][0]) >> 16, lane * each + i * 2 + 1);
  }
  bool taken[each] = {};
#pragma unroll
  for (int rank = 0; rank < S::top_k; rank++) {
    unsigned best = 0;
#pragma unroll
    for (int i = 0; i < each; i++) best = max(best, taken[i] ? 0 : keys[i]);
    best = __reduce_max_sync(~0u, best);
#pragma unroll
    for (int i = 0; i < each; i++) taken[i] |= keys[i] == best;
    if (rank == 0) largest = best;
  }
  float values[each], mass = 0;
#pragma unroll
  for (int i = 0; i < each; i++) {
    values[i] = __expf(key_logit(keys[i]) - key_logit(largest));
    if (taken[i] || !args.renormalize) mass += values[i];
    before += __popc(__ballot_sync(~0u, taken[i]) & ((1u << lane) - 1));
  }
  mass = warp_sum(mass);
#pragma unroll
  for (int i = 0; i < each; i++) {
    if (!taken[i]) continue;
    shared.chosen.experts[before + mine] = lane * each + i;
    shared.chosen.weights[before + mine] = values[i] / mass;
    mine++;
  }
  __syncwarp();
  if (lane == 0) arrive(shared.routed);
}

// Copy the block's part of the chosen experts' gates and ups.
template <class S>
__device__ inline void copy_gates(const Matrix& matrix, unsigned& done, RowStepShared<S>& shared) {
  constexpr int each = S::width / 4;
  GroupShare(S::top_k * each).take_parts([&](GroupShare some) {
    copy_turns(some, kTurns<S::mlp_form, S::hidden>, done, [&](int turn, int group, unsigned number) {
      const long expert = shared.chosen.experts[group / each];
      copy_stage<S, S::mlp_form, S::hidden>(matrix, {expert * 2 * S::width + group % each * 4, S::width},
                                            turn_start<S::mlp_form, S::hidden>(turn), number, shared);
    });
  });
}

// The same of their way back, where a turn is an expert's.
template <class S>
__device__ inline void copy_downs(const Matrix& matrix, unsigned& done, RowStepShared<S>& shared) {
  GroupShare(S::hidden / kStageRows).take_parts([&](GroupShare some) {
    copy_turns(some, S::top_k, done, [&](int turn, int group, unsigned number) {
      const long expert = shared.chosen.experts[turn];
      copy_stage<S, S::mlp_form, S::width>(matrix, {expert * S::hidden + group * kStageRows, 4}, 0, number, shared);
    });
  });
}

template <class S>
__device__ inline void copy_experts(const LayerArgs& layer, const LayerArgs* next, int index, unsigned& done,
                                    RowStepShared<S>& shared) {
  copy_product<S, Form::kBf16, S::hidden, false>(layer.router, S::experts / kStageRows, done, shared);
  if (next) {
    constexpr int all = kMostGroups * kTurns<S::form, S::most_k>;
    prefetch_stages<S::form, S::hidden, false>(next->qkv, S::qkv / kStageRows, 0, all);
    prefetch_stages<S::form, S::attended, false>(next->output, S::hidden / kStageRows, 0, all);
  }
  wait(shared.routed, index % 2);
  copy_gates<S>(layer.gate_up, done, shared);
  copy_downs<S>(layer.down, done, shared);
}

// Multiply all experts' activations with groups of their weight rows, as the row weighs them.
template <class S>
__device__ inline void multiply_downs(GroupShare share, unsigned& done, RowStepShared<S>& shared) {
  clear_sums(share.count(), shared);
#pragma unroll 1
  for (int i = 0; i < S::top_k; i++)
    multiply_turn<S, S::mlp_form, S::width>(share.count(), i * S::width, shared.chosen.weights[i], done, shared);
}

}  // namespace blink
