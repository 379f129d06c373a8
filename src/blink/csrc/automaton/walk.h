// SPDX-License-Identifier: Apache-2.0
// Walking through an automaton that was checked: the same on a CPU, in the scheduler's memory, and in GPU kernels.
#pragma once

#include "automaton/rows.h"

namespace blink {

// Words of a place that an automaton uses.
BLINK_FN uint32_t place_words(const Automaton& automaton) {
  return automaton.has_items() ? kPlaceWordsWithItems : kPlaceWords;
}

// Whether a text may end at a place.
BLINK_FN bool may_end(const Automaton& automaton, const AutomatonPlace& place) {
  uint32_t state = place.state;
  for (uint32_t left = place.depth; automaton.is_final(state); state = place.stack[--left])
    if (left == 0) return true;
  return false;
}

// What one token puts on the stack, and the hashes of items that it completes. Not a part of its walk, whose numbers a
// GPU keeps in registers.
struct Pushes {
  uint16_t states[kMaxTokenPushes];
  uint32_t items[kMaxTokenItems];
};

constexpr uint32_t kItemSeed = 2166136261u, kItemPrime = 16777619u, kItemEnd = 0x100;  // FNV-1a, and a symbol more
BLINK_FN uint32_t hash_on(uint32_t hash, uint32_t symbol) { return (hash ^ symbol) * kItemPrime; }

// What a walk does for items that have to differ: there are none, take them as if they need not, find whether they do,
// or also keep what the next one needs.
enum class Items { kNone, kIgnore, kCompare, kKeep };
BLINK_FN constexpr bool heeds(Items items) { return items == Items::kCompare || items == Items::kKeep; }

// The way of one token from a place: what lies on the stack below is read, not changed.
template <Items kItems>
class Walk {
 public:
  BLINK_FN Walk(const Automaton& automaton, const AutomatonPlace& from, Pushes& pushes, AutomatonPlace* to = nullptr)
      : automaton_(automaton),
        from_(from),
        pushes_(pushes),
        to_(to),
        state_(from.state),
        kept_(from.depth),
        is_deep_(from.depth + kMaxTokenPushes + kMaxNeed > kMaxAutomatonDepth),
        plain_below_(is_deep_ ? 0 : kCallEntry) {
    if constexpr (heeds(kItems)) {
      item_hash_ = from.item_hash;
      item_depth_ = from.item_depth;
      num_closed_ = from.num_closed;
    }
    if constexpr (kItems == Items::kKeep) copy_items();
  }

  // Take one byte; false if the automaton does not allow it. Afterwards the walk is over.
  BLINK_FN bool take(uint8_t byte) {
    const uint32_t column = automaton_.classes[byte];
    const uint32_t next = entry_of(column);
    if (next < plain_below_) return go_to(next, byte, true);
    bool is_direct = true;  // nothing has returned on the way to the byte
    for (uint32_t move = 0; move < kMaxByteMoves; move++) {
      const uint32_t entry = entry_of(column);
      if (entry < kCallEntry) return fits(entry) && go_to(entry, byte, is_direct);
      if (entry != kDeadEntry) {
        AutomatonCall call = automaton_.call(entry - kCallEntry);
        if (!heed_marks(call)) return false;
        if (num_pushed_ == kMaxTokenPushes || !fits(call.back)) return false;
        pushes_.states[num_pushed_++] = call.back;
        state_ = call.target;
        if (!fits(state_)) return false;
      } else if (!automaton_.is_final(state_) || depth() == 0 || !returns(is_direct)) {
        return false;
      } else {
        state_ = num_pushed_ > 0 ? pushes_.states[--num_pushed_] : from_.stack[--kept_];
        is_direct = false;
      }
    }
    return false;
  }

  // The byte that is guessed to come next; kNoGuess: none is, or the text is complete.
  BLINK_FN uint32_t guess() const {
    uint32_t guess = automaton_.guess(state_);
    for (uint32_t left = depth(); guess == kReturnGuess; guess = automaton_.guess(below(--left)))
      if (left == 0) return kNoGuess;
    return guess;
  }

  // Whether a byte has a way on, as far as one step tells.
  BLINK_FN bool may_take(uint8_t byte) const {
    const uint32_t column = automaton_.classes[byte];
    uint32_t entry = entry_of(column), state = state_;
    for (uint32_t left = depth(); entry == kDeadEntry && left > 0 && automaton_.is_final(state);) {
      state = below(--left);
      entry = automaton_.entry_of(state, column);
    }
    return entry != kDeadEntry;
  }

  // Where the walk is, after one more token. `to` may not be `from`; of a walk that keeps items it is the
  // constructor's.
  BLINK_FN void store(AutomatonPlace& to) const {
    to.num_generated = from_.num_generated + 1;
    to.state = uint16_t(state_);
    to.depth = uint8_t(depth());
    to.list = uint8_t(kNoList);
    for (uint32_t i = 0; i < kMaxAutomatonDepth; i++) to.stack[i] = i < depth() ? uint16_t(below(i)) : uint16_t(0);
    if constexpr (kItems == Items::kKeep) {
      to.item_hash = item_hash_;
      to.item_depth = uint16_t(item_depth_);
      to.num_closed = uint16_t(num_closed_);
      for (uint32_t i = num_closed_; i < kMaxUniqueItems; i++) to.closed[i] = 0;
    }
  }

 private:
  BLINK_FN uint32_t entry_of(uint32_t column) const { return automaton_.entry_of(state_, column); }
  BLINK_FN uint32_t depth() const { return kept_ + num_pushed_; }
  BLINK_FN uint32_t below(uint32_t place) const {
    return place < kept_ ? from_.stack[place] : pushes_.states[place - kept_];
  }
  // Whether there is enough of the stack left to come from a state to its end.
  BLINK_FN bool fits(uint32_t state) const {
    return !is_deep_ || depth() + automaton_.need(state) <= kMaxAutomatonDepth;
  }

  // Take the marks from a call, whose way back is about to lie on the stack; false if it may not be made.
  BLINK_FN bool heed_marks(AutomatonCall& call) {
    if constexpr (kItems == Items::kNone) return true;
    if constexpr (heeds(kItems)) {
      const bool is_item = call.target & kMark, is_limit = call.back & kMark;
      if (is_limit && !is_item && (num_closed_ + num_new_ == kMaxUniqueItems || is_closed(kItemSeed))) return false;
      if (is_item) {
        item_hash_ = kItemSeed;
        item_depth_ = depth() + 1;
        if constexpr (kItems == Items::kKeep)
          for (uint32_t i = 0; i < kTrail; i++) to_->trail_states[i] = kDeadEntry;
      }
      if (is_item && is_limit) num_closed_ = num_new_ = 0;
    }
    call = {uint16_t(call.target & ~kMark), uint16_t(call.back & ~kMark)};
    return true;
  }

  // Take a byte to its next state; false if an item that is open would come to where others were.
  BLINK_FN bool go_to(uint32_t next, uint32_t byte, bool is_direct) {
    if constexpr (heeds(kItems)) {
      if (item_depth_ != 0) {
        leave_trail(is_direct);
        item_hash_ = hash_on(item_hash_, byte);
        state_ = next;
        uint32_t depth = this->depth();
        while (depth > item_depth_ && automaton_.is_final(next) && automaton_.is_decided(next)) next = below(--depth);
        if (depth != item_depth_ || !automaton_.is_few(next)) return true;
        return !is_closed(item_hash_) && (!automaton_.is_decided(next) || close(item_hash_));
      }
    }
    state_ = next;
    return true;
  }

  // Before the state on top of the stack is taken from it: an item that could have gone on may end here.
  BLINK_FN bool returns(bool is_direct) {
    if constexpr (heeds(kItems)) {
      if (item_depth_ != 0 && depth() == item_depth_) {
        leave_trail(is_direct);
        const uint32_t hash = hash_on(item_hash_, kItemEnd);
        return !is_closed(hash) && close(hash);
      }
    }
    return true;
  }

  BLINK_FN bool is_closed(uint32_t hash) const {
    const uint32_t* closed = kItems == Items::kKeep ? to_->closed : from_.closed;
    for (uint32_t i = 0; i < num_closed_; i++)
      if (closed[i] == hash) return true;
    for (uint32_t i = 0; i < num_new_; i++)
      if (pushes_.items[i] == hash) return true;
    return false;
  }

  // The open item is a complete one; false if there is no room for it.
  BLINK_FN bool close(uint32_t hash) {
    item_depth_ = 0;
    if constexpr (kItems == Items::kKeep) {
      if (num_closed_ == kMaxUniqueItems) return false;
      to_->closed[num_closed_++] = hash;
      close_trail();
    } else {
      if (num_new_ == kMaxTokenItems || num_closed_ + num_new_ == kMaxUniqueItems) return false;
      pushes_.items[num_new_++] = hash;
    }
    return true;
  }

  // Keep where the open item is before its next byte, or its end.
  BLINK_FN void leave_trail(bool is_direct) {
    if constexpr (kItems == Items::kKeep) {
      for (uint32_t i = kTrail - 1; i > 0; i--) {
        to_->trail_states[i] = to_->trail_states[i - 1];
        to_->trail_hashes[i] = to_->trail_hashes[i - 1];
      }
      to_->trail_states[0] = uint16_t(is_direct && depth() == item_depth_ ? state_ : kDeadEntry);
      to_->trail_hashes[0] = item_hash_;
    }
  }

  // On the way back from an item that has closed, close what nothing is open behind.
  BLINK_FN void close_trail() {
    for (uint32_t i = 0; i < kTrail; i++) {
      const uint32_t state = to_->trail_states[i], hash = to_->trail_hashes[i];
      if (state == kDeadEntry || !automaton_.is_few(state) || has_way_on(state, hash)) return;
      uint32_t kept = 0;
      for (uint32_t n = 0; n < num_closed_; n++)
        if (!is_behind(to_->closed[n], state, hash)) to_->closed[kept++] = to_->closed[n];
      to_->closed[kept++] = hash;
      num_closed_ = kept;
    }
  }

  BLINK_FN bool has_way_on(uint32_t state, uint32_t hash) const {
    for (uint32_t symbol = 0; symbol <= kItemEnd; symbol++)
      if (is_way(state, symbol) && !is_closed(hash_on(hash, symbol))) return true;
    return false;
  }
  BLINK_FN bool is_behind(uint32_t closed, uint32_t state, uint32_t hash) const {
    for (uint32_t symbol = 0; symbol <= kItemEnd; symbol++)
      if (is_way(state, symbol) && hash_on(hash, symbol) == closed) return true;
    return false;
  }
  BLINK_FN bool is_way(uint32_t state, uint32_t symbol) const {
    if (symbol == kItemEnd) return automaton_.is_final(state);
    return automaton_.entry_of(state, automaton_.classes[symbol]) != kDeadEntry;
  }

  BLINK_FN void copy_items() {
    for (uint32_t i = 0; i < kMaxUniqueItems; i++) to_->closed[i] = i < num_closed_ ? from_.closed[i] : 0;
    for (uint32_t i = 0; i < kTrail; i++) {
      to_->trail_states[i] = item_depth_ != 0 ? from_.trail_states[i] : uint16_t(kDeadEntry);
      to_->trail_hashes[i] = item_depth_ != 0 ? from_.trail_hashes[i] : 0;
    }
  }

  const Automaton& automaton_;
  const AutomatonPlace& from_;
  Pushes& pushes_;
  AutomatonPlace* const to_;
  uint32_t state_, kept_, num_pushed_ = 0;
  uint32_t item_hash_ = 0, item_depth_ = 0;
  uint32_t num_closed_ = 0, num_new_ = 0;  // hashes of the place, and of the token
  const bool is_deep_;
  const uint32_t plain_below_;  // entries that are the next state, and nothing else is to be done or checked
};

// The bytes of all tokens: token t has text[starts[t]] .. text[starts[t + 1]], and behind the last are some to fill a
// uint64_t. A token without bytes is never allowed.
struct Vocabulary {
  const uint32_t* starts;
  const uint8_t* text;

  template <Items kItems>
  BLINK_FN bool take(Walk<kItems>& walk, uint32_t token) const {
    const uint32_t end = starts[token + 1];
    for (uint32_t at = starts[token]; at < end; at++)
      if (!walk.take(text[at])) return false;
    return end > starts[token];
  }

  // Whether a token may come next at a place.
  template <Items kItems>
  BLINK_FN bool allows(const Automaton& automaton, const AutomatonPlace& place, uint32_t token) const {
    constexpr uint32_t kWindow = sizeof(uint64_t);
    const auto* windows = reinterpret_cast<const uint64_t*>(text);
    uint32_t at = starts[token];
    const uint32_t end = starts[token + 1];
    if (at == end) return false;
    Pushes pushes;
    Walk<kItems> walk(automaton, place, pushes);
    for (uint64_t window = windows[at / kWindow] >> at % kWindow * 8;;) {
      if (!walk.take(uint8_t(window))) return false;
      if (++at == end) return true;
      window = at % kWindow == 0 ? windows[at / kWindow] : window >> 8;
    }
  }
};

}  // namespace blink
