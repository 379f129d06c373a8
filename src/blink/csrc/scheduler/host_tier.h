// SPDX-License-Identifier: Apache-2.0
// Blocks of the prefix cache in host memory. A block that is evicted is kept there, and is restored when a prompt needs
// it again (host_restore.h).
//
// The scheduler lists copies. Whoever runs the next launch makes them before its first layer, in their order. So a host
// block that is read and then taken for another block is read first. Where copies are made while steps run, those of
// host_paging.h are the only ones. Functions here run on one lane.
#pragma once

#include "scheduler/hash_table.h"

namespace blink {

constexpr uint32_t kHostLooks = 128;  // at host blocks, for one that may be taken

BLINK_FN bool has_host(const State& s) { return s.geometry.num_host_blocks > 0; }
BLINK_FN bool copies_beside(const State& s) { return s.geometry.copies_beside != 0; }
BLINK_FN HashView host_table(const State& s) { return {s.host.table, s.host.hashes, s.geometry.host_hash_entries - 1}; }
BLINK_FN int32_t* host_tokens(const State& s, uint32_t host_block) {
  return s.host.tokens + uint64_t(host_block) * s.geometry.block_size;
}

BLINK_FN uint32_t copy_room(const State& s) {
  return s.geometry.host_copies - (s.host.copies_tail - s.host.order->begin);
}

BLINK_FN void add_copy(State& s, HostCopy copy) {
  s.host.copies[s.host.copies_tail++ & (s.geometry.host_copies - 1)] = copy;
}

// Let who copies make the copies that are listed; those of the order before are over.
BLINK_FN void send_copies(State& s) {
  s.host.order->begin = s.host.order->end;
  s.host.order->end = s.host.copies_tail;
}

// Whether the order in flight, as far as is known, is over.
BLINK_FN bool is_order_over(const State& s) {
  return s.host.num_ordered > 0 && load_acquire(s.host.order->done) == load_relaxed(s.host.order->ordered);
}

// Whether a sequence waits for the order in flight.
BLINK_FN bool is_being_restored(const State& s, const Sequence& q) {
  return s.host.restored > 0 && &s.sequences[s.host.restored - 1] == &q && q.arrival == s.host.restored_arrival;
}

BLINK_RARE_FN void forget_host_block(State& s, uint32_t host_block) {
  remove_entry(host_table(s), host_block);
  s.host.marks[host_block] = HostMark::kEmpty;
  s.statistics.num_host_blocks_used--;
}

// Take a host block that is empty or was not found lately; kNone: a look at some finds none.
BLINK_RARE_FN uint32_t take_host_block(State& s) {
  for (uint32_t look = 0; look < kHostLooks; look++) {
    const uint32_t at = s.host.hand;
    HostMark& mark = s.host.marks[at];
    s.host.hand = at + 1 == s.geometry.num_host_blocks ? 0 : at + 1;
    if (mark == HostMark::kCold) forget_host_block(s, at);
    if (mark == HostMark::kEmpty) return at;
    if (mark == HostMark::kHot) mark = HostMark::kCold;
  }
  return kNone;
}

// The host block with a registered block's hash, plus one; 0: there is none.
BLINK_FN uint32_t find_host_entry(const State& s, uint32_t block) {
  return s.host.table[find_entry(host_table(s), s.block_hashes[block])];
}

// Whether the host block of an entry has a registered block's content.
BLINK_FN bool has_content(const State& s, uint32_t entry, uint32_t block) {
  return entry != 0 && s.host.ids[entry - 1] == registration_of(s, block);
}

// Whether the host has a registered block's content.
BLINK_FN bool is_on_host(const State& s, uint32_t block) { return has_content(s, find_host_entry(s, block), block); }

// The same. The host block then stays for longer. One of other content that has the hash gives way, unless it is
// pinned.
BLINK_RARE_FN bool renew_on_host(State& s, uint32_t block) {
  const uint32_t entry = find_host_entry(s, block);
  if (entry == 0) return false;
  HostMark& mark = s.host.marks[entry - 1];
  if (mark == HostMark::kPinned) return true;
  const bool is_same = has_content(s, entry, block);
  if (is_same)
    mark = HostMark::kHot;
  else
    forget_host_block(s, entry - 1);
  return is_same;
}

// List the copy of a registered block to a host block that was taken for it, and note whose content it will be.
BLINK_RARE_FN void describe_copy(State& s, uint32_t block, uint32_t taken) {
  s.host.hashes[taken] = s.block_hashes[block];
  s.host.ids[taken] = registration_of(s, block);
  s.host.parents[taken] = s.block_parents[block];
  add_copy(s, {block, taken, 1});
}

// Let a host block be found whose copy was described.
BLINK_RARE_FN void list_host_block(State& s, uint32_t taken) {
  insert_entry(host_table(s), s.host.hashes[taken], taken);
  s.host.marks[taken] = HostMark::kCold;
  s.statistics.num_host_blocks_used++;
  s.statistics.host_blocks_stored++;
}

// Keep a registered block that is about to be evicted, unless its content is there.
BLINK_RARE_FN void keep_on_host(State& s, uint32_t block) {
  if (renew_on_host(s, block) || copy_room(s) <= s.host.copies_kept) return;
  const uint32_t taken = take_host_block(s);
  if (taken == kNone) return;
  describe_copy(s, block, taken);
  for (uint32_t k = 0; k < s.geometry.block_size; k++) host_tokens(s, taken)[k] = block_tokens(s, block)[k];
  list_host_block(s, taken);
}

}  // namespace blink
