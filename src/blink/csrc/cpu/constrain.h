// SPDX-License-Identifier: Apache-2.0
// The tokens that an automaton allows next, on a CPU.
#pragma once

#include <limits>

#include "automaton/walk.h"
#include "region/layout.h"

namespace blink {

// One row's slot and where its tables are.
struct ConstrainedRow {
  const uint8_t* automaton;
  AutomatonPlace* places;  // two
  const uint32_t* token_starts;
  const uint8_t* token_text;
  const int32_t* stop_tokens;
  uint32_t num_stop_tokens, vocab_size, num_generated;
  int32_t last_token;
};

// Hide the logits of all tokens that may not come next. Returns whether the text may end here; -1 if the row samples
// nothing that is used.
inline int32_t constrain(const ConstrainedRow& row, float* logits) {
  const Automaton automaton(row.automaton);
  const Vocabulary vocabulary{row.token_starts, row.token_text};
  AutomatonPlace place;
  if (!find_place(automaton, vocabulary, row.places, row.num_generated, row.last_token, place)) return -1;
  row.places[row.num_generated & 1] = place;
  const bool may_end = Walk(automaton, place).may_end();
  float ends[kMaxStopTokens];
  for (uint32_t i = 0; i < row.num_stop_tokens; i++) ends[i] = logits[row.stop_tokens[i]];
  for (uint32_t token = 0; token < row.vocab_size; token++) {
    Walk walk(automaton, place);
    if (!vocabulary.take(walk, token)) logits[token] = -std::numeric_limits<float>::infinity();
  }
  for (uint32_t i = 0; i < row.num_stop_tokens; i++)
    logits[row.stop_tokens[i]] = may_end ? ends[i] : -std::numeric_limits<float>::infinity();
  return may_end;
}

}  // namespace blink
