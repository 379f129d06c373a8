// SPDX-License-Identifier: Apache-2.0
// Recent answers of other requests, from which drafts are copied too (suffix decoding). A ring has their tokens, and
// one table the n-grams of all of them.
//
// An answer is copied as its sequence ends. Its n-grams are indexed while the next step runs. Both take a bounded
// number of tokens. Sequences of one scope share their answers: those whose Sqe::hash_root is the same, which share
// cached blocks too.
#pragma once

#include "scheduler/ngram.h"

namespace blink {

constexpr uint32_t kMostKeptTokens = 4096;           // of the answers that end in one step
constexpr uint32_t kMostAnswerTokens = 0x80000000u;  // since answers were last forgotten: places in the table only grow

BLINK_FN bool has_answers(const State& s) { return s.geometry.num_answers > 0; }

// A token of the ring, by the number of tokens that were written before it.
BLINK_FN AnswerToken& answer_token(const State& s, uint32_t at) {
  return s.answers[at & (s.geometry.answer_tokens - 1)];
}

// The entry of n tokens before `end` in answers of a scope.
BLINK_FN uint32_t& answer_entry(const State& s, uint64_t scope, const int32_t* end, uint32_t n) {
  const uint32_t hash = hash_ngram(uint32_t(scope) ^ uint32_t(scope >> 32), end, n);
  return s.answer_heads[hash & (s.geometry.answer_entries - 1)];
}

// Copy the answer of a sequence that is complete, or its first tokens; returns how many.
template <class Env>
BLINK_FN uint32_t keep_answer(Env& env, State& s, const Sequence& q, uint32_t most_tokens) {
  const bool is_complete = q.finish == FinishReason::kStop || q.finish == FinishReason::kLength;
  const uint32_t count = is_complete && q.drafting.scope != 0 ? least(q.num_generated, most_tokens) : 0;
  if (count <= s.geometry.ngram_min) return 0;
  const uint32_t head = s.answer_head, number = s.last_answer + 1;
  const int32_t* answer = tokens_of(s, q.slot) + q.num_tokens - q.num_generated;
  for (uint32_t i = env.lane(); i < count; i += env.lanes())
    answer_token(s, head + i) = {q.drafting.scope, answer[i], number};
  env.sync();
  if (env.lane() == 0) {
    answer_token(s, head + count) = AnswerToken{};
    s.answer_head = head + count + 1;
    s.last_answer = number;
  }
  env.sync();
  return count;
}

// Keep the answers of sequences that have ended, s.scratch[0 .. count - 1], before their slots are free.
template <class Env>
BLINK_RARE_FN void keep_answers(Env& env, State& s, uint32_t count) {
  uint32_t left = least(kMostKeptTokens, s.geometry.answer_tokens / 2);
  for (uint32_t n = 0; n < count; n++) left -= keep_answer(env, s, s.sequences[s.scratch[n]], left);
}

// Put the n-grams that end before a token of the ring into the table. Runs on: any lane.
template <class Env>
BLINK_FN void index_answer(Env& env, const State& s, uint32_t at) {
  const AnswerToken& next = answer_token(s, at);
  int32_t before[kMostNgram];  // in their order
  uint32_t count = 0;
  for (; next.answer != 0 && count < s.geometry.ngram_max; count++) {
    const AnswerToken& each = answer_token(s, at - 1 - count);
    if (each.answer != next.answer) break;
    before[kMostNgram - 1 - count] = each.token;
  }
  for (uint32_t n = s.geometry.ngram_min; n <= count; n++)
    env.raise(answer_entry(s, next.scope, before + kMostNgram, n), at + 1);
}

// Index the answers that were kept since. Before places outgrow a word all answers are forgotten.
template <class Env>
BLINK_RARE_FN void index_answers(Env& env, State& s) {
  const uint32_t head = s.answer_head;
  const bool is_full = head >= kMostAnswerTokens;
  if (head == s.num_indexed_answer_tokens) return;
  for (uint32_t at = s.num_indexed_answer_tokens + env.lane(); at < head; at += env.lanes()) index_answer(env, s, at);
  for (uint32_t i = env.lane(); is_full && i < s.geometry.answer_entries; i += env.lanes()) s.answer_heads[i] = 0;
  env.sync();
  if (env.lane() == 0) {
    if (is_full) s.answer_head = 0;
    s.num_indexed_answer_tokens = s.answer_head;
  }
  env.sync();
}

// How many tokens before a place are those before `end` of the sequence's text, of at most so many. All are read at
// once.
BLINK_RARE_FN uint32_t match_length(const State& s, const Sequence& q, uint32_t place, uint32_t end,
                                    uint32_t most_tokens) {
  const uint32_t first = first_answer_place(s), size = s.geometry.max_model_len;
  const bool is_answer = place >= first;
  const int32_t* text = tokens_of(s, q.slot) + end;
  uint32_t length = least(most_tokens, is_answer ? end : least(end, place % size));
  for (uint32_t i = length; i > 0; i--) {
    const uint32_t at = is_answer ? first + ((place - first - i) & (s.geometry.answer_tokens - 1)) : place - i;
    const bool is_same = token_at(s, q, at) == text[-int32_t(i)] && (!is_answer || has_token(s, q, at, 0));
    if (!is_same) length = i - 1;
  }
  return length;
}

// The place in recent answers behind the longest n-gram that the text's first `end` tokens end with; kNone: there is
// none.
BLINK_RARE_FN uint32_t look_up_answers(const State& s, const Sequence& q, uint32_t end) {
  const uint64_t scope = q.drafting.scope;
  if (scope == 0) return kNone;
  for (uint32_t n = least(s.geometry.ngram_max, end); n >= s.geometry.ngram_min; n--) {
    const uint32_t head = answer_entry(s, scope, tokens_of(s, q.slot) + end, n);
    if (head == 0) continue;
    const AnswerToken& next = answer_token(s, head - 1);
    const bool is_recent = next.scope == scope && s.last_answer - next.answer < s.geometry.num_answers;
    const uint32_t place = first_answer_place(s) + ((head - 1) & (s.geometry.answer_tokens - 1));
    if (is_recent && match_length(s, q, place, end, n) == n) return place;
  }
  return kNone;
}

}  // namespace blink
