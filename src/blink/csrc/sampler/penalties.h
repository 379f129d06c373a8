// SPDX-License-Identifier: Apache-2.0
// What changes a row's logits before sampling: an automaton, the minimum length, biases and penalties, in vLLM's order.
// A row stays as the model made it. The few logits that are changed, those of the text's tokens above all, are kept
// apart. A bit for each token says whether it is one of them. What an automaton hides is seen in its own bits.
#pragma once

#include "sampler/row.h"
#include "scheduler/state.h"

namespace blink {

// What is known of a token: bits, and how often it was generated.
constexpr uint32_t kIsStop = 1, kIsBiased = 2, kInPrompt = 4, kBeginsAgo = 8, kEndsAgo = 16, kGenerated = 32;

// Reasoning whose tokens are spent is closed by a logit that no bias and no noise outweighs. That it has begun is seen
// for so many steps: a model may write some tokens before it reasons.
constexpr float kClosingLogit = 1e6f;
constexpr uint32_t kClosingSteps = 8;

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
  // Whether the next token is one of those by which reasoning has to end.
  BLINK_FN bool may_close() const {
    const uint64_t limit = params.sampling.reasoning_limit;
    return limit > 0 && length - (params.num_prompt_tokens + limit - 1) < kClosingSteps;
  }
  BLINK_FN bool has_changes() const {
    return params.num_biases > 0 || is_penalized() || may_close() || (is_too_short() && params.num_stop_tokens > 0);
  }

  // Call visit(token, known) for each stop token that is hidden, each bias, each token of the text that is penalized,
  // and for the token that ends reasoning: where that has begun, and where it has ended.
  template <class Group, class Visit>
  BLINK_FN void for_each_changed(const Group& group, Visit visit) const {
    const uint32_t num_stops = is_too_short() ? params.num_stop_tokens : 0;
    visit_some(group, stop_tokens, num_stops, [&](uint32_t, int32_t token) { visit(token, kIsStop); });
    visit_some(group, bias_tokens, params.num_biases, [&](uint32_t, int32_t token) { visit(token, kIsBiased); });
    visit_some(group, tokens, is_penalized() ? length : 0,
               [&](uint32_t i, int32_t token) { visit(token, i < params.num_prompt_tokens ? kInPrompt : kGenerated); });
    if (may_close()) visit_reasoning(group, visit);
  }

  // The logit of a token about which that much is known.
  BLINK_FN float change(float logit, int32_t token, uint32_t known) const {
    const Sampling& p = params.sampling;
    if (known & kIsStop) logit = -kInfinity;
    BLINK_ROLLED
    for (uint32_t i = 0; known & kIsBiased && i < params.num_biases; i++)
      if (bias_tokens[i] == token) logit += bias_values[i];
    const uint32_t count = known / kGenerated;
    if (count > 0 || known & kInPrompt) logit = logit > 0 ? logit / p.repetition_penalty : logit * p.repetition_penalty;
    if (count > 0) logit -= p.frequency_penalty * float(count) + p.presence_penalty;
    const bool is_open = (known & (kBeginsAgo | kEndsAgo)) == kBeginsAgo;
    return is_open && logit > -kInfinity ? kClosingLogit : logit;
  }

 private:
  template <class Group, class Visit>
  BLINK_FN void visit_reasoning(const Group& group, Visit visit) const {
    const int32_t open = params.sampling.reasoning_open, close = params.sampling.reasoning_close;
    if (open < 0 && group.thread() == 0) visit(close, kBeginsAgo);
    visit_some(group, tokens + params.num_prompt_tokens, length - params.num_prompt_tokens,
               [&](uint32_t, int32_t token) {
                 if (token == open) visit(close, kBeginsAgo);
                 if (token == close) visit(close, kEndsAgo);
               });
  }

  template <class Group, class Visit>
  BLINK_FN static void visit_some(const Group& group, const int32_t* tokens, uint32_t count, Visit visit) {
    BLINK_ROLLED
    for (uint32_t i = group.thread(); i < count; i += Group::kThreads) visit(i, tokens[i]);
  }
};

constexpr uint32_t kTokensOfWord = 32, kQuadsOfWord = kTokensOfWord / 4;

struct ChangeWord {
  uint32_t bits;    // for each token, whether its logit is changed
  uint32_t before;  // how many of the part are changed before these
};

// How many of these words a part has.
BLINK_FN uint32_t change_words(uint32_t quads) { return (quads + kQuadsOfWord - 1) / kQuadsOfWord; }

// How many logits of a row can be changed.
BLINK_FN uint32_t most_changes(uint32_t vocab_size, uint32_t max_model_len) {
  return least(vocab_size, max_model_len + kMaxLogitBiases + kMaxStopTokens + 1);
}

// Changes of a block's part of a row.
struct Changes {
  const uint32_t* allowed;  // of a row that is_constrained: a bit for each token that may come; null: none may
  ChangeWord* words;        // null: no logit is changed
  uint32_t* values;         // the changed logits; first what is known of their tokens
  bool is_constrained;

  BLINK_FN bool hides(uint32_t token) const { return is_constrained && (shown_of(token / 4) >> token % 4 & 1) == 0; }

  // Of four tokens those that may come.
  BLINK_FN uint32_t shown_of(uint32_t quad_of_row) const {
    return allowed == nullptr ? 0 : allowed[quad_of_row / kQuadsOfWord] >> quad_of_row % kQuadsOfWord * 4;
  }

  BLINK_FN uint32_t& value_of(uint32_t place) const {
    const ChangeWord word = words[place / kTokensOfWord];
    return values[word.before + count_bits(word.bits & ((1u << place % kTokensOfWord) - 1))];
  }

  // The part's quad i, which is one of the row, as it is changed.
  BLINK_FN Quad change(Quad quad, uint32_t i, uint32_t quad_of_row) const {
    if (is_constrained) {
      const uint32_t shown = shown_of(quad_of_row);
      BLINK_UNROLLED
      for (int j = 0; j < 4; j++) quad.values[j] = shown >> j & 1 ? quad.values[j] : -kInfinity;
    }
    const uint32_t changed = words == nullptr ? 0 : words[i / kQuadsOfWord].bits >> i % kQuadsOfWord * 4 & 15;
    if (changed == 0) return quad;
    const uint32_t* value = &value_of(i * 4);
    BLINK_UNROLLED
    for (int j = 0; j < 4; j++)
      if (changed >> j & 1) quad.values[j] = __builtin_bit_cast(float, *value++);
    return quad;
  }
};

// Memory for the changes of a block's part of a row: what the block's threads share, and what all blocks do.
struct ChangeMemory {
  Changes& changes;
  ChangeWord* words;  // [change_words(count of the part)]
  uint32_t* values;   // [most_changes()], of all blocks
};

// A part of a row of which some logits may be changed.
template <class Part>
struct ChangedPart : Part {
  const Changes* changes;  // null: none

  BLINK_FN ChangedPart(const Part& part, const Changes* made) : Part(part), changes(made) {}

  BLINK_FN Quad get(uint32_t i) const { return change(Part::load(i), i); }
  BLINK_FN Quad change(const Quad& quad, uint32_t i) const {
    return changes == nullptr ? quad : changes->change(quad, i, Part::first + i);
  }
};

// Find the changes of a block's part in these steps: which logits are changed, where each is in memory, what is known
// of its token, and what it becomes. Penalties are counted afresh from the text, so that no state outlives the step.
template <class Group, class Part>
class ChangeFinder {
 public:
  BLINK_FN ChangeFinder(const Group& group, RowShared<Group>& shared, const Part& part, const RowSlot& slot,
                        Changes& changes)
      : group_(group), shared_(shared), part_(part), slot_(slot), changes_(changes), words_(change_words(part.count)) {
    const uint32_t share = (words_ + Group::kThreads - 1) / Group::kThreads;
    begin_ = least(group.thread() * share, words_);
    end_ = least(begin_ + share, words_);
  }

  BLINK_FN void find(uint32_t* values) {
    if (group_.thread() == 0) shared_.num_changes = 0;
    for (uint32_t i = group_.thread(); i < words_; i += Group::kThreads) changes_.words[i].bits = 0;
    group_.meet();
    for_each_place([&](uint32_t place, uint32_t) {
      group_.set_bits(changes_.words[place / kTokensOfWord].bits, 1u << place % kTokensOfWord);
    });
    group_.sync();
    const uint32_t total = number();
    if (group_.thread() == Group::kThreads - 1) changes_.values = values + group_.add_in(0, shared_.num_changes, total);
    group_.sync();
    for_each_own([&](uint32_t, uint32_t& value) { value = 0; });
    group_.sync();
    for_each_place([&](uint32_t place, uint32_t known) {
      uint32_t& value = changes_.value_of(place);
      if (known == kGenerated)
        group_.add(value, known);
      else
        group_.set_bits(value, known);
    });
    group_.sync();
    for_each_own([&](uint32_t place, uint32_t& value) {
      const uint32_t token = part_.first * 4 + place;
      const float logit = changes_.hides(token) ? -kInfinity : part_.logit(place);
      value = __builtin_bit_cast(uint32_t, slot_.change(logit, int32_t(token), value));
    });
    group_.sync();
  }

 private:
  // Visit the places in the part of the tokens that change, and what is known of each.
  template <class Visit>
  BLINK_FN void for_each_place(Visit visit) const {
    slot_.for_each_changed(group_, [&](int32_t token, uint32_t known) {
      const uint32_t place = uint32_t(token) - part_.first * 4;
      if (place < part_.num_logits()) visit(place, known);
    });
  }

  // Write how many changed logits are before each word of this thread's; the last thread gets the number of all.
  BLINK_FN uint32_t number() const {
    uint32_t own = 0;
    BLINK_ROLLED
    for (uint32_t i = begin_; i < end_; i++) own += count_bits(changes_.words[i].bits);
    auto before = uint32_t(add_up_before(group_, shared_, typename Group::Real(own)));
    BLINK_ROLLED
    for (uint32_t i = begin_; i < end_; i++) {
      changes_.words[i].before = before;
      before += count_bits(changes_.words[i].bits);
    }
    return before;
  }

  // Visit the places of this thread's changed logits.
  template <class Visit>
  BLINK_FN void for_each_own(Visit visit) const {
    BLINK_ROLLED
    for (uint32_t i = begin_; i < end_; i++) {
      const ChangeWord word = changes_.words[i];
      uint32_t* value = changes_.values + word.before;
      BLINK_ROLLED
      for (uint32_t left = word.bits; left != 0; left &= left - 1)
        visit(i * kTokensOfWord + count_bits((left & (0 - left)) - 1), *value++);
    }
  }

  const Group& group_;
  RowShared<Group>& shared_;
  const Part& part_;
  const RowSlot& slot_;
  Changes& changes_;
  const uint32_t words_;  // of the part
  uint32_t begin_, end_;  // this thread's
};

// Find the changes of a block's part; null: there are none.
template <class Group, class Part>
BLINK_FN const Changes* find_changes(const Group& group, RowShared<Group>& shared, const Part& part,
                                     const ChangeMemory& memory, const RowSlot& slot) {
  const bool is_constrained = slot.params.automaton > 0, has_changes = slot.has_changes();
  if (!is_constrained && !has_changes) return nullptr;
  Changes& changes = memory.changes;
  if (group.thread() == 0) changes = {slot.allowed, has_changes ? memory.words : nullptr, nullptr, is_constrained};
  group.sync();
  if (has_changes) ChangeFinder<Group, Part>(group, shared, part, slot, changes).find(memory.values);
  return &changes;
}

}  // namespace blink
