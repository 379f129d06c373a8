// SPDX-License-Identifier: Apache-2.0
// One row's token and log probabilities, with the semantics of vLLM's sampler, by any group of threads (row.h). A token
// depends on its row's logits, seed and length alone, never on the batch around it or on the group.
#pragma once

#include "sampler/draw.h"
#include "sampler/logprobs.h"
#include "sampler/penalties.h"

namespace blink {

// The first of the largest logits, for every thread. Its value is NaN or infinite if there is none.
template <class Group, class Part>
BLINK_FN Winner find_largest(const Group& group, RowShared<Group>& shared, const Part& part) {
  typename Group::Peak peak;
  scan_quads(group, part, [&](const Quad& quad, uint32_t i) { peak.take(quad, i); });
  return meet_winners(group, shared, peak.found(part));
}

// Draw a token from the softmax of the logits over the temperature, truncated as the parameters ask.
template <class Group, class Part>
BLINK_FN Winner draw_token(const Group& group, RowShared<Group>& shared, const Part& part, uint32_t step,
                           const Sampling& p) {
  const Extremes extremes = find_extremes(group, shared, part);
  const float largest = extremes.largest / p.temperature;
  if (!is_finite(largest)) return {largest, 0};
  const float floor = find_floor(group, shared, part, extremes, 1 / p.temperature, p);
  return draw(group, shared, part, extremes.largest, floor, step, p);
}

// Write the best logprobs of a row, and give thread 0 of block 0 the logarithm of all logits' mass.
template <class Group, class Part>
BLINK_FN typename Group::Real rank_logprobs(const Group& group, RowShared<Group>& shared, Best& best, const Part& part,
                                            uint32_t wanted, int32_t* tokens, float* logprobs) {
  const Extremes extremes = find_extremes(group, shared, part);
  if (!is_finite(extremes.largest)) {  // what is not finite was hidden, or nothing would have been sampled
    constexpr float kNan = __builtin_bit_cast(float, 0x7fc00000u);
    for (uint32_t i = group.thread(); group.block() == 0 && i < wanted; i += Group::kThreads)
      tokens[i] = int32_t(i), logprobs[i] = kNan;
    return kNan;
  }
  Ranking<Group, Part> ranking(group, shared, best, part, extremes);
  const typename Group::Real log_mass = extremes.largest + group.log(ranking.add_masses());
  if (wanted == 0) return log_mass;
  ranking.find(wanted);
  if (group.block() == 0) write_best(group, best, wanted, log_mass, tokens, logprobs);
  return log_mass;
}

// Where to a row is sampled.
struct SampledRow {
  uint32_t may_end;  // whether the text may end where the automaton allows nothing
  int32_t* token;
  float* logprob;
  int32_t* top_tokens;  // [kMaxLogprobs]
  float* top_logprobs;
};

// Sample one row; part: the block's, of the logits as the model made them.
template <class Group, class Part>
BLINK_FN void sample_row(const Group& group, RowShared<Group>& shared, Best& best, const Part& part,
                         const ChangeMemory& memory, const SampledRow& row, const RowSlot& slot) {
  const Sampling& p = slot.params.sampling;
  const auto changed = part.with(find_changes(group, shared, part, memory, slot));
  const Winner winner = p.temperature < kGreedyTemperature ? find_largest(group, shared, changed)
                                                           : draw_token(group, shared, changed, slot.length, p);
  const bool is_first = group.block() == 0 && group.thread() == 0;
  const bool has_token = is_finite(winner.value);
  if (is_first)
    *row.token = has_token                                   ? int32_t(winner.token)
                 : row.may_end && winner.value == -kInfinity ? kGrammarDone
                                                             : kInvalidLogits;
  if (p.num_logprobs < 0 || !has_token) return;
  const uint32_t ranked = uint32_t(p.num_logprobs) - p.named_logprobs;
  const auto log_mass =
      rank_logprobs(group, shared, best, part.with(nullptr), ranked, row.top_tokens, row.top_logprobs);
  if (!is_first) return;
  *row.logprob = float(part.logit_of(winner.token) - log_mass);
  BLINK_ROLLED
  for (uint32_t i = 0; i < p.named_logprobs; i++) {
    row.top_tokens[i] = slot.bias_tokens[i];
    row.top_logprobs[i] = float(part.logit_of(uint32_t(slot.bias_tokens[i])) - log_mass);
  }
}

}  // namespace blink
