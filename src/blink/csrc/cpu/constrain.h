// SPDX-License-Identifier: Apache-2.0
// The tokens that an automaton allows next, on a CPU: what csrc/gpu/constrain.cu does on a GPU.
#pragma once

#include <cstring>

#include "automaton/walk.h"

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

// Set the bits of the tokens that may come next; stop tokens may where the text may end. Returns whether it may.
inline bool list_allowed(const ConstrainedRow& row, uint32_t* bits) {
  const Automaton automaton(row.automaton);
  const Vocabulary vocabulary{row.token_starts, row.token_text};
  AutomatonPlace place{};
  std::memset(bits, 0, (row.vocab_size + 31) / 32 * 4);
  if (!find_place(automaton, vocabulary, row.places, row.num_generated, row.last_token, place)) return false;
  keep_place(row.places, place);
  for (uint32_t first = 0; first < row.vocab_size; first += 32)
    bits[first / 32] = vocabulary.list_allowed(automaton, place, first, least(32u, row.vocab_size - first));
  const bool ends = may_end(automaton, place);
  for (uint32_t i = 0; i < row.num_stop_tokens; i++) {
    const auto token = uint32_t(row.stop_tokens[i]);
    if (ends)
      bits[token / 32] |= 1u << token % 32;
    else
      bits[token / 32] &= ~(1u << token % 32);
  }
  return ends;
}

}  // namespace blink
