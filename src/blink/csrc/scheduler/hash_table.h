// SPDX-License-Identifier: Apache-2.0
// The table that finds a cached block by the hash of its tokens and all before them.
#pragma once

#include "scheduler/event_log.h"
#include "scheduler/failure.h"

namespace blink {

// Open addressing with linear probing; removal shifts back, so there are no tombstones. An entry is an index + 1 of
// `hashes`; 0: it is empty.
struct HashView {
  uint32_t* table;
  Hash* hashes;
  uint32_t mask;
};

// Position of the hash, or of the empty entry where it would go.
BLINK_RARE_FN uint32_t find_entry(HashView v, Hash h) {
  uint32_t at = uint32_t(h.low) & v.mask;
  while (v.table[at] != 0 && !(v.hashes[v.table[at] - 1] == h)) at = (at + 1) & v.mask;
  return at;
}

// Runs on: one lane.
BLINK_FN void insert_entry(HashView v, Hash h, uint32_t index) {
  v.table[find_entry(v, h)] = index + 1;
  v.hashes[index] = h;
}

// False if the table does not hold it. Runs on: one lane.
BLINK_RARE_FN bool remove_entry(HashView v, uint32_t index) {
  uint32_t hole = find_entry(v, v.hashes[index]);
  if (v.table[hole] != index + 1) return false;
  for (uint32_t at = (hole + 1) & v.mask; v.table[at] != 0; at = (at + 1) & v.mask) {
    const uint32_t home = uint32_t(v.hashes[v.table[at] - 1].low) & v.mask;
    if (((at - home) & v.mask) < ((at - hole) & v.mask)) continue;
    v.table[hole] = v.table[at];
    hole = at;
  }
  v.table[hole] = 0;
  return true;
}

BLINK_FN HashView hash_view(const State& s) { return {s.hash_table, s.block_hashes, s.geometry.hash_entries - 1}; }
BLINK_FN uint32_t hash_find(const State& s, Hash h) { return find_entry(hash_view(s), h); }

BLINK_FN int32_t* block_tokens(const State& s, uint32_t block) {
  return s.block_tokens + uint64_t(block) * s.geometry.block_size;
}
BLINK_FN Registration registration_of(const State& s, uint32_t block) { return s.block_ids[block]; }

// The block with a hash that was registered as `id`; kNone: nobody finds it any more.
BLINK_FN uint32_t find_registered(const State& s, Hash h, Registration id) {
  const uint32_t entry = s.hash_table[hash_find(s, h)];
  return entry != 0 && registration_of(s, entry - 1) == id ? entry - 1 : kNone;
}

// Make a block findable by a hash that no other has. Runs on: one lane.
BLINK_RARE_FN void hash_insert(State& s, Hash h, uint32_t block) {
  insert_entry(hash_view(s), h, block);
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
  s.block_hashed[block] = 0;
  if (has_events(s)) unlist_block(s, block);
  forget_snapshot(s, block);
  forget_window(s, block);
  if (!remove_entry(hash_view(s), block)) fail(s, ErrorCode::kHashTableCorrupt, BLINK_HERE, block);
}

}  // namespace blink
