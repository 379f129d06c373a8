// SPDX-License-Identifier: Apache-2.0
// Walking through an automaton that was checked: the same on a CPU, in the scheduler's memory, and in GPU kernels.
#pragma once

#include "region/automaton.h"

namespace blink {

struct Automaton {
  const uint8_t* classes;
  const AutomatonCall* calls;
  const uint16_t* rows;
  const uint8_t* traits;
  uint32_t num_classes, start;

  BLINK_FN explicit Automaton(const uint8_t* bytes) {
    const auto& header = *reinterpret_cast<const AutomatonHeader*>(bytes);
    const AutomatonLayout layout = automaton_layout(header);
    classes = bytes + sizeof(AutomatonHeader);
    calls = reinterpret_cast<const AutomatonCall*>(bytes + layout.calls);
    rows = reinterpret_cast<const uint16_t*>(bytes + layout.rows);
    traits = bytes + layout.traits;
    num_classes = header.num_classes;
    start = header.start;
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

// The way of one token from a place: what lies on the stack below is read, not changed.
class Walk {
 public:
  BLINK_FN Walk(const Automaton& automaton, const AutomatonPlace& from)
      : automaton_(automaton),
        from_(from),
        state_(from.state),
        kept_(from.depth),
        is_deep_(from.depth + kMaxTokenPushes + kMaxNeed > kMaxAutomatonDepth) {}

  // Begin again, for another token.
  BLINK_FN void restart() {
    state_ = from_.state;
    kept_ = from_.depth;
    num_pushed_ = 0;
  }

  // Take one byte; false if the automaton does not allow it. Afterwards the walk is over.
  BLINK_FN bool take(uint8_t byte) {
    const uint32_t column = automaton_.classes[byte];
    for (uint32_t move = 0; move < kMaxByteMoves; move++) {
      const uint32_t entry = automaton_.rows[state_ * automaton_.num_classes + column];
      if (entry < kCallEntry) {
        state_ = entry;
        return fits(state_);
      }
      if (entry != kDeadEntry) {
        const AutomatonCall call = automaton_.calls[entry - kCallEntry];
        if (num_pushed_ == kMaxTokenPushes || !fits(call.back)) return false;
        pushed_[num_pushed_++] = call.back;
        state_ = call.target;
        if (!fits(state_)) return false;
      } else if (!automaton_.is_final(state_) || depth() == 0) {
        return false;
      } else {
        state_ = num_pushed_ > 0 ? pushed_[--num_pushed_] : from_.stack[--kept_];
      }
    }
    return false;
  }

  // Where the walk is, after one more token. `to` may not be `from`.
  BLINK_FN void store(AutomatonPlace& to) const {
    to.num_generated = from_.num_generated + 1;
    to.state = uint16_t(state_);
    to.depth = uint16_t(depth());
    for (uint32_t i = 0; i < kMaxAutomatonDepth; i++)
      to.stack[i] = i < kept_ ? from_.stack[i] : i < depth() ? pushed_[i - kept_] : uint16_t(0);
  }

 private:
  BLINK_FN uint32_t depth() const { return kept_ + num_pushed_; }
  // Whether there is enough of the stack left to come from a state to its end.
  BLINK_FN bool fits(uint32_t state) const {
    return !is_deep_ || depth() + automaton_.need(state) <= kMaxAutomatonDepth;
  }

  const Automaton& automaton_;
  const AutomatonPlace& from_;
  uint32_t state_, kept_, num_pushed_ = 0;
  const bool is_deep_;
  uint16_t pushed_[kMaxTokenPushes];
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

  // Which of up to 32 tokens, `stride` apart from `first` on, may come next at a place: a bit for each. One loop over
  // all their bytes, so that lanes side by side do not wait for each other's longest tokens.
  BLINK_FN uint32_t list_allowed(const Automaton& automaton, const AutomatonPlace& place, uint32_t first,
                                 uint32_t count, uint32_t stride = 1) const {
    constexpr uint32_t kWindow = sizeof(uint64_t);
    const auto* windows = reinterpret_cast<const uint64_t*>(text);
    Walk walk(automaton, place);
    uint64_t window = 0;
    uint32_t bits = 0, at = 0, end = 0, loaded = ~0u;
    for (uint32_t i = 0; i < count;) {
      if (at == end) {
        at = starts[first + i * stride];
        end = starts[first + i * stride + 1];
        walk.restart();
      }
      bool goes_on = at < end;
      if (goes_on) {
        if (at / kWindow != loaded) window = windows[loaded = at / kWindow];
        goes_on = walk.take(uint8_t(window >> at % kWindow * 8));
        at++;
      }
      if (goes_on && at < end) continue;
      bits |= uint32_t(goes_on) << i++;
      at = end;
    }
    return bits;
  }
};

// Keep where a slot stands. What it has reached before stays while its tokens are computed again.
BLINK_FN void keep_place(AutomatonPlace* places, const AutomatonPlace& place) {
  AutomatonPlace& kept = places[place.num_generated & 1];
  if (kept.num_generated == kNoPlace || kept.num_generated <= place.num_generated) kept = place;
}

// Find where a slot stands after `num_generated` tokens, of which `token` is the last. What the step before has left is
// read, and what this one leaves is the slot's other place. False for a row of which only a part is computed again: it
// samples nothing.
BLINK_FN bool find_place(const Automaton& automaton, const Vocabulary& vocabulary, const AutomatonPlace* places,
                         uint32_t num_generated, int32_t token, AutomatonPlace& found) {
  AutomatonPlace start{};
  start.state = uint16_t(automaton.start);
  if (num_generated == 0) {
    found = start;
    return true;
  }
  const AutomatonPlace& last = places[~num_generated & 1];
  if (num_generated > 1 && last.num_generated != num_generated - 1) return false;
  Walk walk(automaton, num_generated > 1 ? last : start);
  if (!vocabulary.take(walk, uint32_t(token))) return false;
  walk.store(found);
  return true;
}

}  // namespace blink
