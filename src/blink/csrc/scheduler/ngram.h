// SPDX-License-Identifier: Apache-2.0
// The texts that drafts are copied from: the sequence's own, and the prediction that came with its request. A table of
// n-grams finds where the newest tokens stood before (prompt lookup decoding). No step scans a text. answers.h adds
// other requests' answers.
//
// A position below max_model_len is one of the sequence's tokens, one below twice that of its prediction, another one
// of recent answers. An n-gram's entry is the position that follows its last occurrence, plus 1. Predictions take
// precedence over the own text.
#pragma once

#include "scheduler/block_hash.h"
#include "scheduler/json_spacing.h"
#include "scheduler/state.h"

namespace blink {

constexpr uint32_t kSureChance = 256;   // that a draft token is accepted
constexpr uint32_t kFirstChance = 205;  // of an origin whose drafts were not verified yet, or not for a while: 0.8
constexpr uint32_t kFirstRest = 16;     // tokens without drafts, once some were of no use

BLINK_FN bool speculates(const State& s) { return s.geometry.spec_tokens > 0; }

BLINK_FN int32_t* tokens_of(const State& s, uint32_t slot) {
  return s.tokens + uint64_t(slot) * s.geometry.max_model_len;
}
BLINK_FN int32_t* prediction_of(const State& s, uint32_t slot) {
  return s.predictions + uint64_t(slot) * s.geometry.max_model_len;
}
BLINK_FN uint32_t* ngrams_of(const State& s, uint32_t slot) {
  return s.ngram_heads + uint64_t(slot) * s.geometry.ngram_entries;
}

// The first position of recent answers.
BLINK_FN uint32_t first_answer_place(const State& s) { return 2 * s.geometry.max_model_len; }

// The token at a place of a sequence's texts.
BLINK_FN int32_t token_at(const State& s, const Sequence& q, uint32_t place) {
  const uint32_t end = s.geometry.max_model_len;
  if (place >= 2 * end) return s.answers[place - 2 * end].token;
  return place < end ? tokens_of(s, q.slot)[place] : prediction_of(s, q.slot)[place - end];
}

// Whether a place is one of a text's, of which the sequence's own has so many tokens.
BLINK_FN bool has_token(const State& s, const Sequence& q, uint32_t place, uint32_t num_tokens) {
  const uint32_t end = s.geometry.max_model_len;
  if (place < end) return place < num_tokens;
  if (place < 2 * end) return place - end < q.sqe.num_prediction_tokens;
  const uint64_t scope = place - 2 * end < s.geometry.answer_tokens ? s.answers[place - 2 * end].scope : 0;
  return scope != 0 && scope == q.drafting.scope;
}

// The place of the next token of a text; recent answers are a ring.
BLINK_FN uint32_t place_after(const State& s, uint32_t place) {
  const uint32_t first = first_answer_place(s);
  return place < first ? place + 1 : first + ((place - first + 1) & (s.geometry.answer_tokens - 1));
}

// FNV-1a of the n tokens before `end`.
BLINK_FN uint32_t hash_ngram(uint32_t seed, const int32_t* end, uint32_t n) {
  uint32_t hash = seed ^ n;
  for (uint32_t i = 1; i <= n; i++) hash = (hash ^ uint32_t(end[-int32_t(i)])) * 16777619u;
  return hash ^ hash >> 15;
}

// The entry of the n tokens before `end`.
BLINK_FN uint32_t ngram_entry(const State& s, const int32_t* end, uint32_t n) {
  return hash_ngram(2166136261u, end, n) & (s.geometry.ngram_entries - 1);
}

// Put the n-grams that end before token `end` of a text into a slot's table. Runs on: any lane.
template <class Env>
BLINK_FN void index_ngrams(Env& env, const State& s, uint32_t slot, const int32_t* text, uint32_t end, uint32_t place) {
  for (uint32_t n = s.geometry.ngram_min; n <= s.geometry.ngram_max && n <= end; n++)
    env.raise(ngrams_of(s, slot)[ngram_entry(s, text + end, n)], place + 1);
}

// Fill the table of a slot that was just loaded.
template <class Env>
BLINK_RARE_FN void index_slot(Env& env, State& s, Sequence& q) {
  const Geometry& g = s.geometry;
  const uint32_t prompt = q.sqe.num_prompt_tokens, prediction = q.sqe.num_prediction_tokens;
  for (uint32_t i = env.lane(); i < g.ngram_entries; i += env.lanes()) ngrams_of(s, q.slot)[i] = 0;
  env.sync();
  for (uint32_t end = 1 + env.lane(); end < prompt; end += env.lanes())
    index_ngrams(env, s, q.slot, tokens_of(s, q.slot), end, end);
  for (uint32_t end = 1 + env.lane(); end < prediction; end += env.lanes())
    index_ngrams(env, s, q.slot, prediction_of(s, q.slot), end, g.max_model_len + end);
  if (env.lane() == 0) {
    q.drafting.scope = hash_of_bytes(q.sqe.hash_root).low;
    q.drafting.num_indexed = prompt;
    q.drafting.guessed_at = 0;
    q.drafting.num_spaced = prompt;
    q.drafting.spacing = new_spacing();
    if (g.has_draft_head) s.head_drafts[q.slot].num_tokens = s.head_drafts[q.slot].rests_until = 0;
    for (OriginRecord& record : q.drafting.records) record = {kFirstChance, 0, 0, kFirstRest};
    q.drafting.source = prediction > 0 ? g.max_model_len + 1 : 0;  // an answer begins as its prediction does
  }
  env.sync();
}

// Add the n-grams that end before token `end` of the sequence's text, and those before. Runs on: one lane for each
// sequence.
template <class Env>
BLINK_FN void index_text(Env& env, const State& s, Sequence& q, uint32_t end) {
  for (uint32_t& next = q.drafting.num_indexed; next <= end; next++)
    index_ngrams(env, s, q.slot, tokens_of(s, q.slot), next, next);
}

// Whether the last n tokens of a text of `end` stand before a place. Entries are shared: its n-gram may be another, and
// shorter.
BLINK_FN bool stands_before(const State& s, const Sequence& q, uint32_t place, uint32_t n, uint32_t end) {
  if (place % s.geometry.max_model_len < n) return false;
  uint32_t differing = 0;
  for (uint32_t i = 1; i <= n; i++) differing += token_at(s, q, place - i) != token_at(s, q, end - i);
  return differing == 0;
}

// The place behind the longest n-gram that the text's first `end` tokens end with; kNone: it stands nowhere else.
BLINK_FN uint32_t look_up(const State& s, const Sequence& q, uint32_t end) {
  for (uint32_t n = least(s.geometry.ngram_max, end); n >= s.geometry.ngram_min; n--) {
    const uint32_t head = ngrams_of(s, q.slot)[ngram_entry(s, tokens_of(s, q.slot) + end, n)];
    if (head > 0 && stands_before(s, q, head - 1, n, end)) return head - 1;
  }
  return kNone;
}

}  // namespace blink
