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
  const Word* from = args.words + S::of_logits + lane * pairs;
#pragma unroll
  for (int i = 0; i < pairs; i++) {
    Word words[1];
    load_words(from + i, words);
    await_words(from + i, tag, words);
    keys[i * 2] = routing_key(unsigned(words[0]) & 0xffff, lane * each + i * 2);
    keys[i * 2 + 1] = routing_key(unsigned(words[0]) >> 16, lane * each + i * 2 + 1);
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
__device__ inline void copy_gates(const Matrix& matrix, Cursor<S::slots>& at, RowStepShared<S>& shared) {
  constexpr int each = S::width / 4, turns = (S::hidden + kStageK<S::mlp_form> - 1) / kStageK<S::mlp_form>;
  const GroupShare share(S::top_k * each);
  for (int group = share.first; group < share.last; group++)
    for (int turn = 0; turn < turns; turn++) {
      const long expert = shared.chosen.experts[group / each];
      const int from = turn_k<S::mlp_form>(group, turn, turns);
      copy_stage<S, S::mlp_form>(matrix, expert * 2 * S::width + group % each * 4, S::width, S::hidden, from,
                                 min(kStageK<S::mlp_form>, S::hidden - from), at, shared);
    }
}

// The same of their way back, an expert's part in each stage.
template <class S>
__device__ inline void copy_downs(const Matrix& matrix, Cursor<S::slots>& at, RowStepShared<S>& shared) {
  const GroupShare share(S::hidden / kStageRows);
  for (int group = share.first; group < share.last; group++)
    for (int i = 0; i < S::top_k; i++)
      copy_stage<S, S::mlp_form>(matrix, long(shared.chosen.experts[i]) * S::hidden + group * kStageRows, 4, S::width,
                                 0, S::width, at, shared);
}

template <class S>
__device__ inline void copy_experts(const LayerArgs& layer, const LayerArgs* next, int index, Cursor<S::slots>& at,
                                    RowStepShared<S>& shared) {
  copy_product<S, Form::kBf16, false>(layer.router, S::experts / kStageRows, S::hidden, at, shared);
  if (next) {
    prefetch_product<S::form>(next->qkv, S::qkv / kStageRows, S::hidden);
    prefetch_product<S::form>(next->output, S::hidden / kStageRows, S::attended);
  }
  wait(shared.routed, index % 2);
  copy_gates<S>(layer.gate_up, at, shared);
  copy_downs<S>(layer.down, at, shared);
}

// Multiply all experts' activations with groups of their weight rows, and add them up as the row weighs them.
template <class S>
__device__ inline void multiply_downs(GroupShare share, Cursor<S::slots>& at, RowStepShared<S>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int group = share.first; group < share.last; group++) {
    float2 total = {};
    for (int i = 0; i < S::top_k; i++) {
      GroupSums<S::mlp_form> sums;
      // The input's k are those of all experts, the stage's those of one.
      multiply_stage<S, S::mlp_form>(sums, i * S::width, S::width, at, shared);
      const float weight = shared.chosen.weights[i];
      const float2 found = sums.total();
      total.x += weight * found.x, total.y += weight * found.y;
    }
    if (lane < 4) *reinterpret_cast<float2*>(&shared.sums[group - share.first][warp][lane * 2]) = total;
  }
}

}  // namespace blink
