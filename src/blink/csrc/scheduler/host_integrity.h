// SPDX-License-Identifier: Apache-2.0
// The invariants of the blocks in host memory, checked from scratch. Host only.
#pragma once

#include "scheduler/host_tier.h"

namespace blink {

// First broken invariant of the host's blocks, or null: each used one is found by its hash, and none is pinned between
// two passes.
inline const char* check_host_tier(const State& s) {
  if (!has_host(s)) return nullptr;
  const HostTier& host = s.host;
  if (host.copies_tail - host.copy_bounds[0] > s.geometry.host_copies)
    return "a copy was written over before its launch";
  if (host.copies_kept != 0) return "a restoration was left half done";
  uint32_t used = 0, entries = 0;
  for (uint32_t at = 0; at < s.geometry.host_hash_entries; at++) {
    if (host.table[at] == 0) continue;
    entries++;
    if (find_entry(host_table(s), host.hashes[host.table[at] - 1]) != at) return "a host block cannot be found";
    if (host.marks[host.table[at] - 1] == HostMark::kEmpty) return "an empty host block is found";
  }
  for (uint32_t block = 0; block < s.geometry.num_host_blocks; block++) {
    used += host.marks[block] != HostMark::kEmpty;
    if (host.marks[block] == HostMark::kPinned) return "a host block stayed pinned";
  }
  if (used != entries) return "a host block is in no table";
  return used == s.statistics.num_host_blocks_used ? nullptr : "the used host blocks are miscounted";
}

}  // namespace blink
