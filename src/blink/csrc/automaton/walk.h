// SPDX-License-Identifier: Apache-2.0
// Walking through an automaton that was checked: the same on a CPU, in the scheduler's memory, and in GPU kernels.
#pragma once

#include "region/automaton.h"

namespace blink {

// An automaton's tables. What is read for each byte has a pointer; rows that are not full are found from the header.
struct Automaton {
  const uint8_t* classes;
  const uint16_t* full;
  const uint8_t* traits;
  uint32_t num_classes, num_full, start;

  BLINK_FN explicit Automaton(const uint8_t* bytes) : classes(bytes + sizeof(AutomatonHeader)) {
    const AutomatonLayout layout = automaton_layout(header());
    full = reinterpret_cast<const uint16_t*>(bytes + layout.full);
    traits = bytes + layout.traits;
    num_classes = header().num_classes;
    num_full = header().num_full;
    start = header().start;
  }

  BLINK_FN const AutomatonHeader& header() const {
    return *reinterpret_cast<const AutomatonHeader*>(classes - sizeof(AutomatonHeader));
  }
  BLINK_FN const AutomatonCall& call(uint32_t index) const {
    return reinterpret_cast<const AutomatonCall*>(classes + kBytes)[index];
  }
  BLINK_FN uint32_t entry_of(uint32_t state, uint32_t column) const {
    return state < num_full ? full[state * num_classes + column] : narrow_entry_of(state - num_full, column);
  }
  BLINK_RARE_FN uint32_t narrow_entry_of(uint32_t place, uint32_t column) const {
    const AutomatonHeader& h = header();
    const AutomatonLayout layout = automaton_layout(h);
    const uint8_t* bytes = classes - sizeof(AutomatonHeader);
    if (place < h.num_mapped) {
      const MappedRow& row = reinterpret_cast<const MappedRow*>(bytes + layout.mapped)[place];
      const uint32_t found = bytes[layout.patterns + row.pattern * num_classes + column];
      return found == kNoMappedEntry ? kDeadEntry : row.entries[found];
    }
    place -= h.num_mapped;
    if (place >= h.num_sparse) {
      const SingleRow& row = reinterpret_cast<const SingleRow*>(bytes + layout.single)[place - h.num_sparse];
      return row.classes[0] == column ? row.entry : kDeadEntry;
    }
    const SparseRow& row = reinterpret_cast<const SparseRow*>(bytes + layout.sparse)[place];
    for (uint32_t i = 0; i < kSparseClasses; i++)
      if (row.classes[i] == column) return row.entries[i];
    return kDeadEntry;
  }
  BLINK_FN bool is_final(uint32_t state) const { return traits[state] & kFinalTrait; }
  BLINK_FN uint32_t need(uint32_t state) const { return traits[state] & (kFinalTrait - 1); }
};

// Whether a text may end at a place.
BLINK_FN bool may_end(const Automaton& automaton, const AutomatonPlace& place) {
  uint32_t state = place.state;
  for (uint32_t left = place.depth; automaton.is_final(state); state = place.stack[--left])
    if (left == 0) return true;
  return false;
}

// What one token puts on the stack. Not a part of its walk, whose numbers a GPU keeps in registers.
struct Pushes {
  uint16_t states[kMaxTokenPushes];
};

// The way of one token from a place: what lies on the stack below is read, not changed.
class Walk {
 public:
  BLINK_FN Walk(const Automaton& automaton, const AutomatonPlace& from, Pushes& pushes)
      : automaton_(automaton),
        from_(from),
        pushes_(pushes),
        state_(from.state),
        kept_(from.depth),
        is_deep_(from.depth + kMaxTokenPushes + kMaxNeed > kMaxAutomatonDepth),
        plain_below_(is_deep_ ? 0 : kCallEntry) {}

  // Take one byte; false if the automaton does not allow it. Afterwards the walk is over.
  BLINK_FN bool take(uint8_t byte) {
    const uint32_t column = automaton_.classes[byte];
    const uint32_t next = entry_of(column);
    if (next < plain_below_) {
      state_ = next;
      return true;
    }
    for (uint32_t move = 0; move < kMaxByteMoves; move++) {
      const uint32_t entry = entry_of(column);
      if (entry < kCallEntry) {
        state_ = entry;
        return fits(state_);
      }
      if (entry != kDeadEntry) {
        const AutomatonCall call = automaton_.call(entry - kCallEntry);
        if (num_pushed_ == kMaxTokenPushes || !fits(call.back)) return false;
        pushes_.states[num_pushed_++] = call.back;
        state_ = call.target;
        if (!fits(state_)) return false;
      } else if (!automaton_.is_final(state_) || depth() == 0) {
        return false;
      } else {
        state_ = num_pushed_ > 0 ? pushes_.states[--num_pushed_] : from_.stack[--kept_];
      }
    }
    return false;
  }

  // Where the walk is, after one more token. `to` may not be `from`.
  BLINK_FN void store(AutomatonPlace& to) const {
    to.num_generated = from_.num_generated + 1;
    to.state = uint16_t(state_);
    to.depth = uint8_t(depth());
    to.list = uint8_t(kNoList);
    for (uint32_t i = 0; i < kMaxAutomatonDepth; i++)
      to.stack[i] = i < kept_ ? from_.stack[i] : i < depth() ? pushes_.states[i - kept_] : uint16_t(0);
  }

 private:
  BLINK_FN uint32_t entry_of(uint32_t column) const { return automaton_.entry_of(state_, column); }
  BLINK_FN uint32_t depth() const { return kept_ + num_pushed_; }
  // Whether there is enough of the stack left to come from a state to its end.
  BLINK_FN bool fits(uint32_t state) const {
    return !is_deep_ || depth() + automaton_.need(state) <= kMaxAutomatonDepth;
  }

  const Automaton& automaton_;
  const AutomatonPlace& from_;
  Pushes& pushes_;
  uint32_t state_, kept_, num_pushed_ = 0;
  const bool is_deep_;
  const uint32_t plain_below_;  // entries that are the next state, and nothing else is to be done or checked
};

// The bytes of all tokens: token t has text[starts[t]] .. text[starts[t + 1]], and behind the last are some to fill a
// uint64_t. A token without bytes is never allowed.
struct Vocabulary {
  const uint32_t* starts;
  const uint8_t* text;

  BLINK_FN bool take(Walk& walk, uint32_t token) const {
    const uint32_t end = starts[token + 1];
    for (uint32_t at = starts[token]; at < end; at++)
      if (!walk.take(text[at])) return false;
    return end > starts[token];
  }

  // Whether a token may come next at a place.
  BLINK_FN bool allows(const Automaton& automaton, const AutomatonPlace& place, uint32_t token) const {
    constexpr uint32_t kWindow = sizeof(uint64_t);
    const auto* windows = reinterpret_cast<const uint64_t*>(text);
    uint32_t at = starts[token];
    const uint32_t end = starts[token + 1];
    if (at == end) return false;
    Pushes pushes;
    Walk walk(automaton, place, pushes);
    for (uint64_t window = windows[at / kWindow] >> at % kWindow * 8;;) {
      if (!walk.take(uint8_t(window))) return false;
      if (++at == end) return true;
      window = at % kWindow == 0 ? windows[at / kWindow] : window >> 8;
    }
  }
};

// Find where a slot stands after `num_generated` tokens, of which `token` is the last. What the step before has left is
// read, and what this one leaves is the slot's other place. False for a row that samples nothing, because only a part
// of its text is computed again, and for a token that the automaton does not allow.
BLINK_FN bool find_place(const Automaton& automaton, const Vocabulary& vocabulary, const AutomatonPlace* places,
                         uint32_t num_generated, int32_t token, AutomatonPlace& found) {
  AutomatonPlace start{};
  start.state = uint16_t(automaton.start);
  for (uint32_t i = 0; i < 2; i++)
    if (places[i].num_generated != kNoPlace && places[i].num_generated > num_generated) return false;
  if (num_generated == 0) {
    found = start;
    return true;
  }
  const AutomatonPlace& last = places[~num_generated & 1];
  if (num_generated > 1 && last.num_generated != num_generated - 1) return false;
  Pushes pushes;
  Walk walk(automaton, num_generated > 1 ? last : start, pushes);
  if (!vocabulary.take(walk, uint32_t(token))) return false;
  walk.store(found);
  return true;
}

BLINK_FN bool is_same_place(const AutomatonPlace& a, const AutomatonPlace& b) {
  bool is_same = a.state == b.state && a.depth == b.depth;
  for (uint32_t i = 0; is_same && i < a.depth; i++) is_same = a.stack[i] == b.stack[i];
  return is_same;
}

// What is known of the tokens that may come next.
enum class Listing : uint32_t {
  kNothing = 0,  // none may
  kKept = 1,     // they are listed: the last token has not moved the text to another place
  kNew = 2,      // they are to be listed
};

// Find where a slot stands, as find_place() does, and which of its two lists is of that place. A new list never takes
// the memory of the list before, which a step that is done again begins with.
BLINK_FN Listing advance(const Automaton& automaton, const Vocabulary& vocabulary, const AutomatonPlace* places,
                         uint32_t num_generated, int32_t token, AutomatonPlace& found) {
  if (!find_place(automaton, vocabulary, places, num_generated, token, found)) return Listing::kNothing;
  const AutomatonPlace& last = places[~num_generated & 1];
  const bool follows = num_generated > 0 && last.num_generated == num_generated - 1 && last.list != kNoList;
  const bool is_kept = follows && is_same_place(last, found);
  found.list = uint8_t(is_kept ? last.list : follows ? 1 + kListsOfSlot - last.list : 1);
  return is_kept ? Listing::kKept : Listing::kNew;
}

}  // namespace blink
