// SPDX-License-Identifier: Apache-2.0
// The table that finds a cached block by the hash of its tokens and all before them.
#pragma once

#include "scheduler/event_log.h"
#include "scheduler/failure.h"

namespace blink {

// Open addressing with linear probing; removal shifts back, so there are no tombstones.
BLINK_FN uint32_t hash_home(const State& s, Hash h) { return uint32_t(h.low) & (s.geometry.hash_entries - 1); }

// Position of the hash, or of the empty entry where it would go.
BLINK_RARE_FN uint32_t hash_find(const State& s, Hash h) {
  const uint32_t mask = s.geometry.hash_entries - 1;
  uint32_t at = hash_home(s, h);
  while (s.hash_table[at] != 0 && !(s.block_hashes[s.hash_table[at] - 1] == h)) at = (at + 1) & mask;
  return at;
}

// Make a block findable by a hash that no other has. Runs on: one lane.
BLINK_RARE_FN void hash_insert(State& s, Hash h, uint32_t block) {
  s.hash_table[hash_find(s, h)] = block + 1;
  s.block_hashes[block] = h;
  s.block_hashed[block] = 1;
}

// Let nobody find the recurrent states behind a block any more. Runs on: one lane.
BLINK_FN void forget_snapshot(State& s, uint32_t block) {
  const uint32_t snapshot = s.block_snapshots[block];
  if (snapshot == 0) return;
  s.block_snapshots[block] = 0;
  s.snapshot_blocks[snapshot - 1] = s.snapshot_readers[snapshot - 1] > 0 ? kNone : 0;
}

// Let a window block be nobody's that was a registered block's. Runs on: one lane.
BLINK_FN void detach_window(State& s, uint32_t window) {
  s.block_windows[s.window_owners[window] - 1] = 0;
  s.window_owners[window] = 0;
}

// Let nobody find the window block of a registered block any more. Runs on: one lane.
BLINK_FN void forget_window(State& s, uint32_t block) {
  if (s.geometry.num_window_blocks == 0 || s.block_windows[block] == 0) return;
  const uint32_t window = s.block_windows[block] - 1;
  detach_window(s, window);
  if (s.window_refs[window] > 0) return;
  s.free_window_blocks[s.num_free_window_blocks++] = window;  // its entry of the LRU queue is dead now
  s.num_evictable_window_blocks--;
}

// Runs on: one lane. Fails: stops the scheduler if the block is not in the table.
BLINK_RARE_FN void hash_remove(State& s, uint32_t block) {
  const uint32_t mask = s.geometry.hash_entries - 1;
  uint32_t hole = hash_find(s, s.block_hashes[block]);
  s.block_hashed[block] = 0;
  if (has_events(s)) unlist_block(s, block);
  forget_snapshot(s, block);
  forget_window(s, block);
  if (s.hash_table[hole] != block + 1) return fail(s, ErrorCode::kHashTableCorrupt, BLINK_HERE, block);
  for (uint32_t at = (hole + 1) & mask; s.hash_table[at] != 0; at = (at + 1) & mask) {
    const uint32_t home = hash_home(s, s.block_hashes[s.hash_table[at] - 1]);
    if (((at - home) & mask) < ((at - hole) & mask)) continue;
    s.hash_table[hole] = s.hash_table[at];
    hole = at;
  }
  s.hash_table[hole] = 0;
}

}  // namespace blink
