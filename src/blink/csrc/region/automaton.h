// SPDX-License-Identifier: Apache-2.0
// The format of an automaton: what the text of a constrained sequence may look like, over bytes.
//
//     AutomatonHeader | uint8 class of each byte [256] | AutomatonCall [num_calls] | uint16 full rows
//     [num_full][num_classes] | MappedRow [num_mapped] | SparseRow [num_sparse] | SingleRow [num_single] |
//     uint8 patterns [num_patterns][num_classes] | uint8 traits [num_states] | uint8 guesses of full rows [num_full]
//
// States are numbered in the order of their rows: most states take few classes of bytes, or one, and need no full row.
// An entry of a row is the next state, kDeadEntry, or kCallEntry + the index of a call. At a call the byte is read
// again in the called state, with the state to come back to on the stack. A final state without an entry for a byte
// returns: the byte is read again in the state on top of the stack.
//
// A state has a guess of the byte that comes next, where little else may: the scheduler proposes tokens by it, and
// nothing else reads it. Mapped rows have none.
//
// Items that have to differ, as those of a JSON array, are texts of marked calls. A walk through one hashes its bytes,
// and keeps the hash where one text alone can complete it, or where it returns: there no other item may come to. Where
// all that could follow some bytes of an item is closed in that way, their hash is kept instead.
#pragma once

#include "region/fields.h"
#include "region/platform.h"

namespace blink {

constexpr uint32_t kMaxAutomatonBytes = 256 << 10;
constexpr uint32_t kAutomatonUnit = 16;  // its size and its place are multiples of this
constexpr uint32_t kAutomatonHashBytes = 16;
constexpr uint32_t kMaxAutomata = 128;       // that an engine holds at once
constexpr uint32_t kMaxAutomatonDepth = 60;  // states on the stack
constexpr uint32_t kMaxTokenPushes = 16;     // of them by one token
constexpr uint32_t kMaxNeed = 16;            // of them that it takes to come from a state to its end
constexpr uint32_t kMaxByteMoves = 96;       // calls and returns before one byte is taken
constexpr uint32_t kBytes = 256;
constexpr uint32_t kMaxAutomatonStates = 0x7fff;
constexpr uint32_t kMaxAutomatonCalls = 0x7fff;
constexpr uint32_t kCallEntry = 0x8000;
constexpr uint32_t kDeadEntry = 0xffff;
constexpr uint32_t kFinalTrait = 0x80;
constexpr uint32_t kDecidedTrait = 0x40;  // one text alone leads from here to the end of its rule
constexpr uint32_t kFewTrait = 0x20;      // at most kMaxUniqueItems texts do; both only where there are marked calls
constexpr uint32_t kNeedOfTrait = 0x1f;   // how much of the stack it takes to come to an end
constexpr uint32_t kMark = 0x8000;        // of a header's start: it has marked calls; of a call's two states: below
constexpr uint32_t kMaxUniqueItems = 64;  // that one array can have
constexpr uint32_t kMaxTokenItems = 8;    // of them by one token
constexpr uint32_t kTrail = 16;           // of so many last bytes of an item it is kept where they began
constexpr uint32_t kNoGuess = 0, kReturnGuess = 1;  // of a state's next byte; the latter: it returns
constexpr uint32_t kSpecialTokenByte = 0xff;        // is never part of a text: begins the text of a special token

struct AutomatonHeader {
  FIELDS_OF(AutomatonHeader);
  FIELD(uint16_t, num_full);
  FIELD(uint16_t, num_mapped);
  FIELD(uint16_t, num_sparse);
  FIELD(uint16_t, num_single);
  FIELD(uint16_t, start);
  FIELD(uint16_t, num_classes);
  FIELD(uint16_t, num_calls);
  FIELD(uint16_t, num_patterns);
};
static_assert(sizeof(AutomatonHeader) == 16, "a header is read at once");

BLINK_FN uint32_t num_states(const AutomatonHeader& h) {
  return uint32_t(h.num_full) + h.num_mapped + h.num_sparse + h.num_single;
}

// A row of many classes and few entries: its pattern has by class which of them it is, or kNoMappedEntry. Many rows
// have one pattern, as those of the characters of a text that are counted.
constexpr uint32_t kMappedEntries = 7;
constexpr uint32_t kNoMappedEntry = kMappedEntries;
struct alignas(16) MappedRow {
  FIELDS_OF(MappedRow);
  FIELD(uint16_t, pattern);
  FIELD_ARRAY(uint16_t, entries, kMappedEntries);
};
static_assert(sizeof(MappedRow) == 16, "a mapped row lies in one line");

// A row of few classes; places that it does not need repeat the first.
constexpr uint32_t kSparseClasses = 5;
struct alignas(16) SparseRow {
  FIELDS_OF(SparseRow);
  FIELD_ARRAY(uint16_t, entries, kSparseClasses);
  FIELD_ARRAY(uint8_t, classes, kSparseClasses);
  FIELD(uint8_t, guess);
};
static_assert(sizeof(SparseRow) == 16, "a sparse row is read at once");

// A row of one class; `entry` is kDeadEntry if it has none.
struct alignas(4) SingleRow {
  FIELDS_OF(SingleRow);
  FIELD(uint16_t, entry);
  FIELD(uint8_t, byte_class);
  FIELD(uint8_t, guess);
};

struct AutomatonCall {
  FIELDS_OF(AutomatonCall);
  FIELD(uint16_t, target);  // marked: of an item that has to differ from others
  FIELD(uint16_t, back);  // marked: of the first one; or, of what is no item, another one follows, if there can be one
};

// Where a sequence stands in its automaton after `num_generated` tokens. A slot has a ring of them, by that number, and
// as many lists of the tokens that may come next: what one step reads, the same step never overwrites.
struct AutomatonPlace {
  FIELDS_OF(AutomatonPlace);
  FIELD(uint32_t, num_generated);
  FIELD(uint16_t, state);
  FIELD(uint8_t, depth);
  FIELD(uint8_t, list);  // which of the slot's lists is of this place, from 1; kNoList: none
  FIELD_ARRAY(uint16_t, stack, kMaxAutomatonDepth);
  // From here on only for automata with marked calls.
  FIELD(uint32_t, item_hash);   // of the open item's bytes so far
  FIELD(uint16_t, item_depth);  // with its way back on the stack; 0: no item is open
  FIELD(uint16_t, num_closed);
  FIELD_ARRAY(uint32_t, closed, kMaxUniqueItems);  // hashes
  FIELD_ARRAY(uint32_t, trail_hashes, kTrail);     // before the open item's last bytes, the last one's first
  FIELD_ARRAY(uint16_t, trail_states, kTrail);     // kDeadEntry: none, or it was left on another way
};
constexpr uint32_t kPlaceWords = 32, kPlaceWordsWithItems = sizeof(AutomatonPlace) / 4;
static_assert(kPlaceWordsWithItems == kPlaceWords + 2 + kMaxUniqueItems + kTrail / 2 * 3,
              "a place without items is 32 words");

constexpr uint32_t kNoPlace = 0xffffffffu;  // its number of tokens before there is one
constexpr uint32_t kNoList = 0;
// Places and lists of a slot that has one row in a step: of this step and the one before. Each further row takes one
// more.
constexpr uint32_t kListsOfSlot = 2;

// 32-bit words of a list: a bit for each token.
BLINK_FN uint32_t list_words(uint32_t vocab_size) { return (vocab_size + 31) / 32; }

// Byte offsets inside one automaton.
struct AutomatonLayout {
  uint32_t calls, full, mapped, sparse, single, patterns, traits, guesses, bytes;
};

BLINK_FN bool valid_header(const AutomatonHeader& h) {
  return num_states(h) > 0 && num_states(h) <= kMaxAutomatonStates && h.num_classes > 0 && h.num_classes <= kBytes &&
         h.num_calls <= kMaxAutomatonCalls && h.num_patterns <= kMaxAutomatonStates &&
         (h.start & ~kMark) < num_states(h);
}

// Of a valid header; the sizes cannot overflow then.
BLINK_FN AutomatonLayout automaton_layout(const AutomatonHeader& h) {
  AutomatonLayout l{};
  const auto aligned = [](uint32_t bytes, uint32_t unit) { return (bytes + unit - 1) / unit * unit; };
  l.calls = uint32_t(sizeof(AutomatonHeader)) + kBytes;
  l.full = l.calls + h.num_calls * uint32_t(sizeof(AutomatonCall));
  l.mapped = aligned(l.full + uint32_t(h.num_full) * h.num_classes * 2, uint32_t(sizeof(MappedRow)));
  l.sparse = l.mapped + h.num_mapped * uint32_t(sizeof(MappedRow));
  l.single = l.sparse + h.num_sparse * uint32_t(sizeof(SparseRow));
  l.patterns = l.single + h.num_single * uint32_t(sizeof(SingleRow));
  l.traits = aligned(l.patterns + uint32_t(h.num_patterns) * h.num_classes, 4);
  l.guesses = aligned(l.traits + num_states(h), 4);
  l.bytes = aligned(l.guesses + h.num_full, kAutomatonUnit);
  return l;
}

}  // namespace blink
