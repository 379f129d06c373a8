// SPDX-License-Identifier: Apache-2.0
// The tokens that an automaton allows next, on a CPU: what csrc/kernels/sampler/constrain.cu does on a GPU.
#pragma once

#include <algorithm>
#include <cstring>

#include "automaton/advance.h"
#include "region/fields.h"

namespace blink {

// One row's slot and where its tables are.
struct ConstrainedRow {
  FIELDS_OF(ConstrainedRow);
  FIELD(const uint8_t*, automaton);
  FIELD(AutomatonPlace*, places);
  FIELD(uint32_t*, lists);
  FIELD(uint32_t, num_lists);  // and places
  FIELD(const uint32_t*, token_starts);
  FIELD(const uint8_t*, token_text);
  FIELD(const int32_t*, stop_tokens);
  FIELD(uint32_t, num_stop_tokens);
  FIELD(uint32_t, vocab_size);
  FIELD(uint32_t, num_generated);
  FIELD(int32_t, last_token);
  FIELD(uint32_t, may_end);  // result: whether the text may
};

template <Items kItems>
void fill_bits(const ConstrainedRow& row, const AutomatonPlace& place, uint32_t* bits) {
  const Automaton automaton(row.automaton);
  const Vocabulary vocabulary{row.token_starts, row.token_text};
  for (uint32_t token = 0; token < row.vocab_size; token++)
    bits[token / 32] |= uint32_t(vocabulary.allows<kItems>(automaton, place, token)) << token % 32;
}

// Set the bits of the tokens that may come next; stop tokens may where the text may end.
inline void fill_list(const ConstrainedRow& row, const AutomatonPlace& place, uint32_t* bits) {
  std::fill_n(bits, list_words(row.vocab_size), 0u);
  if (Automaton(row.automaton).has_items())
    fill_bits<Items::kCompare>(row, place, bits);
  else
    fill_bits<Items::kNone>(row, place, bits);
  for (uint32_t i = 0; i < row.num_stop_tokens; i++) {
    const auto token = uint32_t(row.stop_tokens[i]);
    if (row.may_end)
      bits[token / 32] |= 1u << token % 32;
    else
      bits[token / 32] &= ~(1u << token % 32);
  }
}

// Move a slot on by its last token; returns which of its lists has what may come next, kNoList if nothing may.
inline uint32_t list_allowed(ConstrainedRow& row) {
  const Automaton automaton(row.automaton);
  const Vocabulary vocabulary{row.token_starts, row.token_text};
  AutomatonPlace place{};
  row.may_end = 0;
  const Listing listing =
      advance(automaton, vocabulary, row.places, row.num_lists, row.num_generated, row.last_token, place);
  if (listing == Listing::kNothing) return kNoList;
  std::memcpy(&row.places[row.num_generated % row.num_lists], &place, place_words(automaton) * 4);
  row.may_end = may_end(automaton, place);
  if (listing == Listing::kNew) fill_list(row, place, row.lists + (place.list - 1) * list_words(row.vocab_size));
  return place.list;
}

}  // namespace blink
