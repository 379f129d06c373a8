// SPDX-License-Identifier: Apache-2.0
// Drafts of constrained texts: the bytes that the automaton leaves no choice of, cut into tokens. Keys, quotes and
// brackets of JSON are such bytes.
//
// A draft is the longest tokens along these bytes. A model may cut them otherwise. That costs a row, and changes no
// result. Where white space may come, the guesses of the automaton decide (region/automaton.h).
#pragma once

#include "scheduler/token_index.h"

namespace blink {

constexpr uint32_t kMostGuessed = 64;  // bytes of a draft

// Guess at most so many bytes behind a sequence's newest token, of which it generated so many; returns their number.
// None where the place before that token is not known. Runs on: any lane, while no step is in flight.
BLINK_RARE_FN uint32_t guess_text(const State& s, const Sequence& q, uint32_t num_generated, int32_t newest,
                                  uint8_t* text, uint32_t most_bytes) {
  const uint32_t count = lists_of_slot(s.geometry), before = num_generated - 1;
  const AutomatonPlace& place = s.automaton_places[uint64_t(q.slot) * count + before % count];
  if (place.num_generated != before || newest < 0) return 0;
  const Automaton automaton(s.automata + uint64_t(q.automaton) * kMaxAutomatonBytes);
  Pushes pushes;
  Walk<Items::kIgnore> walk(automaton, place, pushes);
  const uint32_t end = s.token_starts[newest + 1];
  uint32_t length = 0;
  for (uint32_t at = s.token_starts[newest]; at < end + most_bytes; at++) {
    const bool is_known = at < end;
    const uint32_t byte = is_known ? s.token_text[at] : walk.guess();
    if ((!is_known && byte == kNoGuess) || !walk.take(uint8_t(byte))) break;
    if (!is_known) text[length++] = uint8_t(byte);
  }
  return length;
}

// Whether a sequence's text is constrained, and drafts may be made of that.
BLINK_FN bool is_guessed(const State& s, const Sequence& q) {
  return s.geometry.token_entries > 0 && q.automaton != kNone;
}

// Whether something is guessed behind a token of a sequence that generated so many with it.
BLINK_FN bool has_guess(const State& s, const Sequence& q, uint32_t num_generated, int32_t newest) {
  uint8_t text[1];
  return guess_text(s, q, num_generated, newest, text, 1) > 0;
}

// Cut what is guessed behind a sequence's newest token into at most so many tokens; returns their number.
BLINK_FN uint32_t guess_tokens(const State& s, const Sequence& q, uint32_t limit, int32_t* tokens) {
  const int32_t newest = s.tokens[uint64_t(q.slot) * s.geometry.max_model_len + q.num_tokens - 1];
  uint8_t text[kMostGuessed];
  const uint32_t length = guess_text(s, q, q.num_generated, newest, text, kMostGuessed);
  uint32_t count = 0, at = 0;
  while (count < limit && at < length) {
    const FoundToken found = find_token(s, text + at, least(length - at, kMostTokenBytes));
    if (found.length == 0) break;
    tokens[count++] = found.token;
    at += found.length;
  }
  return count;
}

}  // namespace blink
