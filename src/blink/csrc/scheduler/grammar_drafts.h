// SPDX-License-Identifier: Apache-2.0
// Drafts of constrained texts: the bytes that the automaton leaves no choice of, cut into tokens. Keys, quotes and
// brackets of JSON are such bytes.
//
// A draft is the longest tokens along these bytes. A model may cut them otherwise. That costs a row, and changes no
// result. Where white space may come, it is as in the text so far (json_spacing.h), or as the automaton guesses
// (region/automaton.h).
#pragma once

#include "scheduler/json_spacing.h"
#include "scheduler/token_index.h"

namespace blink {

constexpr uint32_t kMostGuessed = 64;  // bytes of a draft

// Guess at most so many bytes behind a sequence's newest token, of which it generated so many; returns their number.
// None where the place before that token is not known. The spacing is known up to that token. Runs on: any lane, while
// no step is in flight.
BLINK_RARE_FN uint32_t guess_text(const State& s, const Sequence& q, uint32_t num_generated, int32_t newest,
                                  uint8_t* text, uint32_t most_bytes) {
  const uint32_t count = lists_of_slot(s.geometry), before = num_generated - 1;
  const AutomatonPlace& place = s.automaton_places[uint64_t(q.slot) * count + before % count];
  if (place.num_generated != before || newest < 0) return 0;
  const Automaton automaton(s.automata + uint64_t(q.automaton) * kMaxAutomatonBytes);
  Pushes pushes;
  Walk<Items::kIgnore> walk(automaton, place, pushes);
  const uint32_t end = s.token_starts[newest + 1];
  Spacing spacing = q.drafting.spacing;
  uint32_t length = 0;
  for (uint32_t at = s.token_starts[newest]; at < end + most_bytes; at++) {
    const bool is_known = at < end;
    const uint32_t byte = is_known ? s.token_text[at] : guess_byte(walk, spacing);
    if ((!is_known && byte == kNoGuess) || !walk.take(uint8_t(byte))) break;
    take_byte(spacing, byte);
    if (!is_known) text[length++] = uint8_t(byte);
  }
  return length;
}

// Whether a sequence's text is constrained, and drafts may be made of that.
BLINK_FN bool is_guessed(const State& s, const Sequence& q) {
  return s.geometry.token_entries > 0 && q.automaton != kNone;
}

// Learn the white space of the sequence's first `end` tokens. Runs on: one lane for each sequence.
BLINK_RARE_FN void read_spacing(const State& s, Sequence& q, uint32_t end) {
  Drafting& d = q.drafting;
  for (; d.num_spaced < end; d.num_spaced++) {
    const int32_t token = s.tokens[uint64_t(q.slot) * s.geometry.max_model_len + d.num_spaced];
    for (uint32_t at = s.token_starts[token]; at < s.token_starts[token + 1]; at++)
      take_byte(d.spacing, s.token_text[at]);
  }
}

// How many bytes a token may have at a place of a guess. Tokenizers keep the last space of several with what follows.
BLINK_FN uint32_t piece_length(const uint8_t* text, uint32_t at, uint32_t length) {
  uint32_t end = at;
  while (end < length && (text[end] == ' ' || text[end] == '\n')) end++;
  const bool ends_with_space = end > at + 1 && text[end - 1] == ' ';
  return least(length - at, ends_with_space ? end - 1 - at : kMostTokenBytes);
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
    const FoundToken found = find_token(s, text + at, least(piece_length(text, at, length), kMostTokenBytes));
    if (found.length == 0) break;
    tokens[count++] = found.token;
    at += found.length;
  }
  return count;
}

}  // namespace blink
