// SPDX-License-Identifier: Apache-2.0
// The state of a slot's automaton after each token, and the list of tokens that may come next.
#pragma once

#include "automaton/walk.h"

namespace blink {

template <Items kItems>
BLINK_FN bool move_on(const Automaton& automaton, const Vocabulary& vocabulary, const AutomatonPlace& from,
                      int32_t token, AutomatonPlace& found) {
  Pushes pushes;
  Walk<kItems> walk(automaton, from, pushes, &found);
  if (from.num_generated != kNoPlace && !vocabulary.take(walk, uint32_t(token))) return false;
  walk.store(found);
  return true;
}

BLINK_RARE_FN bool move_on_in_items(const Automaton& automaton, const Vocabulary& vocabulary,
                                    const AutomatonPlace& from, int32_t token, AutomatonPlace& found) {
  return move_on<Items::kKeep>(automaton, vocabulary, from, token, found);
}

// Find where a slot stands after `num_generated` tokens, of which `token` is the last. What the step before has left is
// read, and what this one leaves takes the oldest of the slot's places. False for a row that samples nothing, because
// only a part of its text is computed again, and for a token that the automaton does not allow.
BLINK_FN bool find_place(const Automaton& automaton, const Vocabulary& vocabulary, const AutomatonPlace* places,
                         uint32_t num_places, uint32_t num_generated, int32_t token, AutomatonPlace& found) {
  for (uint32_t i = 0; i < num_places; i++)
    if (places[i].num_generated != kNoPlace && places[i].num_generated > num_generated) return false;
  AutomatonPlace start;  // of which nothing else is read
  start.num_generated = num_generated - 1;
  start.state = uint16_t(automaton.start);
  start.depth = 0;
  start.item_hash = start.item_depth = start.num_closed = 0;
  const AutomatonPlace& last = places[(num_generated + num_places - 1) % num_places];
  if (num_generated > 1 && last.num_generated != num_generated - 1) return false;
  const AutomatonPlace& from = num_generated > 1 ? last : start;
  return automaton.has_items() ? move_on_in_items(automaton, vocabulary, from, token, found)
                               : move_on<Items::kNone>(automaton, vocabulary, from, token, found);
}

BLINK_FN bool is_same_place(const Automaton& automaton, const AutomatonPlace& a, const AutomatonPlace& b) {
  bool is_same = a.state == b.state && a.depth == b.depth;
  for (uint32_t i = 0; is_same && i < a.depth; i++) is_same = a.stack[i] == b.stack[i];
  if (!automaton.has_items() || !is_same) return is_same;
  is_same = a.item_depth == b.item_depth && a.num_closed == b.num_closed;
  if (a.item_depth != 0) is_same = is_same && a.item_hash == b.item_hash;
  for (uint32_t i = 0; is_same && i < a.num_closed; i++) is_same = a.closed[i] == b.closed[i];
  return is_same;
}

// What is known of the tokens that may come next.
enum class Listing : uint32_t {
  kNothing = 0,  // none may
  kKept = 1,     // they are listed: the last token has not moved the text to another place
  kNew = 2,      // they are to be listed
};

// Find where a slot stands, as find_place() does, and which of its lists is of that place: it has as many as places. A
// new list takes the memory of the oldest, never of the list before, which a step that is done again begins with.
BLINK_FN Listing advance(const Automaton& automaton, const Vocabulary& vocabulary, const AutomatonPlace* places,
                         uint32_t num_places, uint32_t num_generated, int32_t token, AutomatonPlace& found) {
  if (!find_place(automaton, vocabulary, places, num_places, num_generated, token, found)) return Listing::kNothing;
  const AutomatonPlace& last = places[(num_generated + num_places - 1) % num_places];
  const bool follows = num_generated > 0 && last.num_generated == num_generated - 1 && last.list != kNoList;
  const bool is_kept = follows && is_same_place(automaton, last, found);
  found.list = uint8_t(is_kept ? last.list : follows ? 1 + last.list % num_places : 1);
  return is_kept ? Listing::kKept : Listing::kNew;
}

}  // namespace blink
