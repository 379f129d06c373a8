// SPDX-License-Identifier: Apache-2.0
// The invariants of recent answers, checked from scratch. Host only.
#pragma once

#include "scheduler/answers.h"

namespace blink {

// First broken invariant of the ring of recent answers, or null: an answer's tokens stand together, of one scope,
// behind those of older ones; the table names tokens that were written.
inline const char* check_answers(const State& s) {
  const Geometry& g = s.geometry;
  if (s.num_indexed_answer_tokens > s.answer_head) return "n-grams are indexed of answers that were not written";
  uint32_t newest = 0;
  for (uint32_t i = 0; i < least(g.answer_tokens, s.answer_head); i++) {
    const uint32_t at = s.answer_head - 1 - i;
    const AnswerToken& token = answer_token(s, at);
    if ((token.scope == 0) != (token.answer == 0)) return "a recent answer has no scope";
    if (token.token < 0 || uint32_t(token.token) >= g.vocab_size) return "a recent answer has no such token";
    if (token.answer > s.last_answer) return "a recent answer is newer than the last one";
    if (i == 0 && token.answer != 0) return "the last recent answer has no end";
    if (i == 0 || token.answer == 0) continue;
    const AnswerToken& next = answer_token(s, at + 1);
    if (next.answer != 0 && (next.answer != token.answer || next.scope != token.scope))
      return "two recent answers stand together";
    if (newest != 0 && token.answer > newest) return "a recent answer stands before an older one";
    newest = token.answer;
  }
  for (uint32_t i = 0; i < g.answer_entries; i++)
    if (s.answer_heads[i] > s.answer_head) return "a recent answer's n-gram was never written";
  return nullptr;
}

}  // namespace blink
