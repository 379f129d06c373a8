// SPDX-License-Identifier: Apache-2.0
// What changes a row's logits before sampling: an automaton, the minimum length, biases and penalties, in vLLM's order.
#pragma once

#include "sampler/row.h"
#include "scheduler/state.h"

namespace blink {

// A slot, where its tables are, and how many tokens its text has.
struct RowSlot {
  const SlotParams& params;
  const int32_t *tokens, *stop_tokens, *bias_tokens;
  const float* bias_values;
  uint32_t length;
  const uint32_t* allowed;  // of a slot with an automaton: a bit for each token that may come next; null: none may

  BLINK_FN bool is_too_short() const {
    return length < uint64_t(params.num_prompt_tokens) + params.sampling.min_tokens;
  }
  BLINK_FN bool is_penalized() const {
    const Sampling& p = params.sampling;
    return p.repetition_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0;
  }
  BLINK_FN bool is_changed() const {
    return params.automaton > 0 || params.num_biases > 0 || is_penalized() || is_too_short();
  }
};

template <class Group>
BLINK_FN void hide_disallowed(const Group& group, float* logits, uint32_t vocab_size, const uint32_t* allowed) {
  BLINK_ROLLED
  for (uint32_t token = group.rank(); token < vocab_size; token += Group::kSize)
    if (allowed == nullptr || (allowed[token / 32] >> token % 32 & 1) == 0) logits[token] = -kInfinity;
}

// Penalties are counted afresh from the text, so that no state outlives the step. A token's count is twice how often it
// was generated, plus 1 if the prompt has it. Who takes a count applies its penalty.
template <class Group>
BLINK_FN void apply_penalties(const Group& group, float* logits, uint32_t* counts, const RowSlot& slot) {
  const Sampling& p = slot.params.sampling;
  BLINK_ROLLED
  for (uint32_t i = group.rank(); i < slot.length; i += Group::kSize) counts[slot.tokens[i]] = 0;
  group.meet();
  BLINK_ROLLED
  for (uint32_t i = group.rank(); i < slot.length; i += Group::kSize) {
    uint32_t& count = counts[slot.tokens[i]];
    if (i < slot.params.num_prompt_tokens)
      group.set_bits(count, 1u);
    else
      group.add(count, 2u);
  }
  group.meet();
  BLINK_ROLLED
  for (uint32_t i = group.rank(); i < slot.length; i += Group::kSize) {
    const uint32_t count = group.exchange(counts[slot.tokens[i]], 0u);
    if (count == 0) continue;
    float& logit = logits[slot.tokens[i]];
    logit = logit > 0 ? logit / p.repetition_penalty : logit * p.repetition_penalty;
    if (count > 1) logit -= p.frequency_penalty * float(count / 2) + p.presence_penalty;
  }
}

// Change logits (float32 [vocab_size]) in place. counts: memory for as many numbers.
template <class Group>
BLINK_FN void change_logits(const Group& group, float* logits, uint32_t* counts, uint32_t vocab_size,
                            const RowSlot& slot) {
  if (slot.params.automaton > 0) {
    hide_disallowed(group, logits, vocab_size, slot.allowed);
    group.meet();
  }
  if (slot.is_too_short()) {
    for (uint32_t i = group.rank(); i < slot.params.num_stop_tokens; i += Group::kSize)
      logits[slot.stop_tokens[i]] = -kInfinity;
    group.meet();
  }
  if (slot.params.num_biases > 0) {
    for (uint32_t i = group.rank(); i < slot.params.num_biases; i += Group::kSize)
      group.add(logits[slot.bias_tokens[i]], slot.bias_values[i]);
    group.meet();
  }
  if (slot.is_penalized()) {
    apply_penalties(group, logits, counts, slot);
    group.meet();
  }
}

}  // namespace blink
