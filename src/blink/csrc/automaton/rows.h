// SPDX-License-Identifier: Apache-2.0
// Reads the tables of an automaton that was checked.
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
    start = header().start & ~kMark;
  }

  BLINK_FN const AutomatonHeader& header() const {
    return *reinterpret_cast<const AutomatonHeader*>(classes - sizeof(AutomatonHeader));
  }
  BLINK_FN bool has_items() const { return header().start & kMark; }
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
      return row.byte_class == column ? row.entry : kDeadEntry;
    }
    const SparseRow& row = reinterpret_cast<const SparseRow*>(bytes + layout.sparse)[place];
    for (uint32_t i = 0; i < kSparseClasses; i++)
      if (row.classes[i] == column) return row.entries[i];
    return kDeadEntry;
  }
  BLINK_RARE_FN uint32_t guess(uint32_t state) const {
    const AutomatonHeader& h = header();
    const AutomatonLayout layout = automaton_layout(h);
    const uint8_t* bytes = classes - sizeof(AutomatonHeader);
    if (state < num_full) return bytes[layout.guesses + state];
    const uint32_t place = state - num_full;
    if (place < h.num_mapped) return kNoGuess;
    if (place < uint32_t(h.num_mapped) + h.num_sparse)
      return reinterpret_cast<const SparseRow*>(bytes + layout.sparse)[place - h.num_mapped].guess;
    return reinterpret_cast<const SingleRow*>(bytes + layout.single)[place - h.num_mapped - h.num_sparse].guess;
  }
  BLINK_FN bool is_final(uint32_t state) const { return traits[state] & kFinalTrait; }
  BLINK_FN bool is_decided(uint32_t state) const { return traits[state] & kDecidedTrait; }
  BLINK_FN bool is_few(uint32_t state) const { return traits[state] & kFewTrait; }
  BLINK_FN uint32_t need(uint32_t state) const { return traits[state] & kNeedOfTrait; }
};

}  // namespace blink
