// SPDX-License-Identifier: Apache-2.0
// Blocks of the prefix cache in host memory. A block that is evicted is kept there, and is restored when a prompt needs
// it again (host_restore.h).
//
// The scheduler lists copies. Whoever runs the next launch makes them before its first layer, in their order. So a host
// block that is read and then taken for another block is read first. Functions here run on one lane.
#pragma once

#include "scheduler/hash_table.h"

namespace blink {

constexpr uint32_t kHostLooks = 128;  // at host blocks, for one that may be taken

BLINK_FN bool has_host(const State& s) { return s.geometry.num_host_blocks > 0; }
BLINK_FN HashView host_table(const State& s) { return {s.host.table, s.host.hashes, s.geometry.host_hash_entries - 1}; }
BLINK_FN int32_t* host_tokens(const State& s, uint32_t host_block) {
  return s.host.tokens + uint64_t(host_block) * s.geometry.block_size;
}

BLINK_FN uint32_t copy_room(const State& s) {
  return s.geometry.host_copies - (s.host.copies_tail - s.host.copy_bounds[0]);
}

BLINK_FN void add_copy(State& s, HostCopy copy) {
  s.host.copies[s.host.copies_tail++ & (s.geometry.host_copies - 1)] = copy;
}

// Let the launch that comes make the copies that are listed; those of the one before are over.
BLINK_FN void send_copies(State& s) {
  s.host.copy_bounds[0] = s.host.copy_bounds[1];
  s.host.copy_bounds[1] = s.host.copies_tail;
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

// Whether the host has a registered block's content, which then stays for longer. One of other content that has the
// hash gives way, unless it is pinned.
BLINK_RARE_FN bool renew_on_host(State& s, uint32_t block) {
  const uint32_t entry = s.host.table[find_entry(host_table(s), s.block_hashes[block])];
  if (entry == 0) return false;
  HostMark& mark = s.host.marks[entry - 1];
  if (mark == HostMark::kPinned) return true;
  const bool is_same = s.host.ids[entry - 1] == registration_of(s, block);
  if (is_same)
    mark = HostMark::kHot;
  else
    forget_host_block(s, entry - 1);
  return is_same;
}

// Keep a registered block that is about to be evicted, unless its content is there.
BLINK_RARE_FN void keep_on_host(State& s, uint32_t block) {
  HostTier& host = s.host;
  if (renew_on_host(s, block) || copy_room(s) <= host.copies_kept) return;
  const uint32_t taken = take_host_block(s);
  if (taken == kNone) return;
  insert_entry(host_table(s), s.block_hashes[block], taken);
  host.marks[taken] = HostMark::kCold;
  host.ids[taken] = registration_of(s, block);
  host.parents[taken] = s.block_parents[block];
  for (uint32_t k = 0; k < s.geometry.block_size; k++) host_tokens(s, taken)[k] = block_tokens(s, block)[k];
  add_copy(s, {block, taken, 1});
  s.statistics.num_host_blocks_used++;
  s.statistics.host_blocks_stored++;
}

}  // namespace blink
