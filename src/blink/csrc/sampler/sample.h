// SPDX-License-Identifier: Apache-2.0
// One row's token and log probabilities, with the semantics of vLLM's sampler, by any group of threads (row.h). A token
// depends on its row's logits, seed and length alone, never on the batch around it or on the group.
#pragma once

#include "sampler/draw.h"
#include "sampler/logprobs.h"
#include "sampler/penalties.h"

namespace blink {

// The first of the largest logits. Thread 0 of block 0 gets it; no token's value is NaN or infinite if there is none.
template <class Group, class Part>
BLINK_FN Winner find_largest(const Group& group, RowShared<Group>& shared, const Part& part) {
  const float largest = find_extremes(group, shared, part).largest;
  Winner found{largest, ~0u};
  if (!is_finite(largest)) return found;
  BLINK_ROLLED
  for (uint32_t i = group.thread(); i < part.count && found.token == ~0u; i += Group::kThreads) {
    const Quad quad = part.get(i);
    BLINK_UNROLLED
    for (int j = 3; j >= 0; j--)
      if (quad.values[j] == largest) found.token = (part.first + i) * 4 + j;
  }
  return meet_winners(group, shared, found);
}

// Draw a token from the softmax of the logits times `factor`, truncated as the parameters ask.
template <class Group, class Part>
BLINK_FN Winner draw_token(const Group& group, RowShared<Group>& shared, const Part& part, float factor, uint32_t step,
                           const Sampling& p) {
  const Extremes extremes = find_extremes(group, shared, part);
  if (!is_finite(extremes.largest)) return {extremes.largest, 0};
  const float floor = find_floor(group, shared, part, extremes, factor, p);
  return draw(group, shared, part, extremes.largest, factor, floor, step, p);
}

// Write the best logprobs of a row, and give thread 0 of block 0 the logarithm of all logits' mass.
template <class Group, class Part>
BLINK_FN typename Group::Real rank_logprobs(const Group& group, RowShared<Group>& shared, Best& best, const Part& part,
                                            uint32_t wanted, int32_t* tokens, float* logprobs) {
  const Extremes extremes = find_extremes(group, shared, part);
  if (!is_finite(extremes.largest)) {  // what is not finite was hidden, or nothing would have been sampled
    constexpr float kNan = __builtin_bit_cast(float, 0x7fc00000u);
    for (uint32_t i = group.rank(); i < wanted; i += Group::kSize) tokens[i] = int32_t(i), logprobs[i] = kNan;
    return kNan;
  }
  Ranking<Group, Part> ranking(group, shared, best, part, extremes);
  const typename Group::Real log_mass = extremes.largest + group.log(ranking.add_masses());
  if (wanted == 0) return log_mass;
  ranking.find(wanted);
  if (group.block() == 0) write_best(group, best, wanted, log_mass, tokens, logprobs);
  return log_mass;
}

// What one row is sampled from, and where to.
struct SampledRow {
  const float* logits;  // [vocab_size], then -inf up to a multiple of 4
  float* changed;       // memory for as many
  uint32_t* counts;     // memory for vocab_size
  uint32_t vocab_size;
  uint32_t may_end;  // whether the text may end where the automaton allows nothing
  int32_t* token;
  float* logprob;
  int32_t* top_tokens;  // [kMaxLogprobs]
  float* top_logprobs;
};

// A row's logits as they are to be sampled from, its own or changed ones.
template <class Group>
BLINK_FN const float* prepare_logits(const Group& group, const SampledRow& row, const RowSlot& slot) {
  const float temperature = slot.params.sampling.temperature;
  const bool is_greedy = temperature < kGreedyTemperature;
  if (is_greedy && !slot.is_changed()) return row.logits;
  const uint32_t padded = (row.vocab_size + 3) / 4 * 4;
  for (uint32_t i = group.rank(); i < padded; i += Group::kSize) row.changed[i] = row.logits[i];
  group.meet();
  change_logits(group, row.changed, row.counts, row.vocab_size, slot);
  if (!is_greedy)
    for (uint32_t i = group.rank(); i < row.vocab_size; i += Group::kSize) row.changed[i] /= temperature;
  group.meet();
  return row.changed;
}

// Sample one row.
template <class Group>
BLINK_FN void sample_row(const Group& group, RowShared<Group>& shared, Best& best, const SampledRow& row,
                         const RowSlot& slot) {
  const Sampling& p = slot.params.sampling;
  const auto part_of = [&](const float* logits) {
    FloatPart part{reinterpret_cast<const Quad*>(logits), 0, 0};
    share_out(group, (row.vocab_size + 3) / 4, part.first, part.count);
    part.quads += part.first;
    return part;
  };
  const FloatPart part = part_of(prepare_logits(group, row, slot));
  const Winner winner = p.temperature < kGreedyTemperature ? find_largest(group, shared, part)
                                                           : draw_token(group, shared, part, 1, slot.length, p);
  const bool is_first = group.rank() == 0;
  const bool has_token = is_finite(winner.value);
  if (is_first)
    *row.token = has_token                                   ? int32_t(winner.token)
                 : row.may_end && winner.value == -kInfinity ? kGrammarDone
                                                             : kInvalidLogits;
  if (p.num_logprobs < 0 || !group.share(has_token)) return;
  const auto log_mass = rank_logprobs(group, shared, best, part_of(row.logits), uint32_t(p.num_logprobs),
                                      row.top_tokens, row.top_logprobs);
  if (is_first) *row.logprob = float(row.logits[winner.token] - log_mass);
}

}  // namespace blink
