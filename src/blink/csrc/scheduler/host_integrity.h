// SPDX-License-Identifier: Apache-2.0
// The invariants of the blocks in host memory, checked from scratch. Host only.
#pragma once

#include <vector>

#include "scheduler/host_tier.h"

namespace blink {

// Copies that are made while steps run.
inline uint32_t copies_in_flight(const State& s) {
  return copies_beside(s) && s.host.num_ordered > 0 ? s.host.order->end - s.host.order->begin : 0;
}

// First broken invariant of the order in flight, or null: it holds all that it reads and writes. Counts its references.
inline const char* check_order(const State& s, std::vector<uint32_t>& refs) {
  if (s.host.num_ordered > kBlocksOfOrder) return "an order has too many blocks";
  if (s.host.num_ordered == 0 && (s.host.restored > 0 || s.host.is_void)) return "no order is for somebody";
  for (uint32_t n = 0; n < s.host.num_ordered; n++) refs[s.host.ordered_blocks[n]]++;
  for (uint32_t n = 0; n < copies_in_flight(s); n++) {
    const HostCopy copy = s.host.copies[(s.host.order->begin + n) & (s.geometry.host_copies - 1)];
    if (s.host.marks[copy.host_block] != HostMark::kPinned) return "a host block is copied that is not pinned";
    if (s.ref_counts[copy.block] == 0) return "a block is copied that nobody holds";
    if (!copy.to_host && (s.block_hashed[copy.block] || s.ref_counts[copy.block] != 1))
      return "a block is known before its copy is there";
  }
  return nullptr;
}

// First broken invariant of the host's blocks, or null: each used one is found by its hash, and none is pinned but by
// the order in flight.
inline const char* check_host_tier(const State& s) {
  if (!has_host(s)) return nullptr;
  const HostTier& host = s.host;
  if (host.copies_tail - host.order->begin > s.geometry.host_copies) return "a copy was written over before its launch";
  if (host.copies_kept != 0) return "a restoration was left half done";
  uint32_t used = 0, pinned = 0, entries = 0;
  for (uint32_t at = 0; at < s.geometry.host_hash_entries; at++) {
    if (host.table[at] == 0) continue;
    entries++;
    if (find_entry(host_table(s), host.hashes[host.table[at] - 1]) != at) return "a host block cannot be found";
    if (host.marks[host.table[at] - 1] == HostMark::kEmpty) return "an empty host block is found";
  }
  for (uint32_t block = 0; block < s.geometry.num_host_blocks; block++) {
    used += host.marks[block] != HostMark::kEmpty;
    pinned += host.marks[block] == HostMark::kPinned;
  }
  if (pinned != copies_in_flight(s)) return "a host block stayed pinned";
  if (used != entries + (host.restored > 0 && !host.is_void ? 0 : pinned)) return "a host block is in no table";
  return entries == s.statistics.num_host_blocks_used ? nullptr : "the used host blocks are miscounted";
}

}  // namespace blink
