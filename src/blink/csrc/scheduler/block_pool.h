// SPDX-License-Identifier: Apache-2.0
// The two pools of KV blocks. Layers without a window keep all tokens of a sequence, in blocks. Layers with a window
// keep the newest ones, in window blocks. A block and the window block of the same tokens have one registration in the
// prefix cache, which is the block's.
//
// kv_cache.h hands out blocks of either pool. A pool says where its words are, and which of its blocks the prefix cache
// keeps.
#pragma once

#include "scheduler/host_tier.h"

namespace blink {

BLINK_FN int32_t* block_table(const State& s, uint32_t slot) {
  return s.block_tables + uint64_t(slot) * s.geometry.max_blocks;
}
BLINK_FN int32_t* window_table(const State& s, uint32_t slot) {
  return s.window_tables + uint64_t(slot) * s.geometry.max_blocks;
}

// What a pool counts.
struct PoolCounts {
  uint32_t &num_free, &num_evictable, &lru_head, &lru_count, &next_stamp;
};

struct FullPool {
  static BLINK_FN uint32_t* refs(const State& s) { return s.ref_counts; }
  static BLINK_FN uint32_t* free(const State& s) { return s.free_blocks; }
  static BLINK_FN uint32_t* stamps(const State& s) { return s.block_stamps; }
  static BLINK_FN LruEntry* lru(const State& s) { return s.lru; }
  static BLINK_FN uint32_t lru_entries(const State& s) { return s.geometry.lru_entries; }
  static BLINK_FN int32_t* table(const State& s, uint32_t slot) { return block_table(s, slot); }
  static BLINK_FN PoolCounts counts(State& s) {
    return {s.num_free_blocks, s.num_evictable, s.lru_head, s.lru_count, s.next_stamp};
  }
  static BLINK_FN bool is_cached(const State& s, uint32_t block) { return s.block_hashed[block] != 0; }
  // Let nobody find a cached block any more. Runs on: one lane.
  static BLINK_FN void forget(State& s, uint32_t block) {
    if (has_host(s)) keep_on_host(s, block);
    hash_remove(s, block);
    s.statistics.evicted_blocks++;
  }
};

struct WindowPool {
  static BLINK_FN uint32_t* refs(const State& s) { return s.window_refs; }
  static BLINK_FN uint32_t* free(const State& s) { return s.free_window_blocks; }
  static BLINK_FN uint32_t* stamps(const State& s) { return s.window_stamps; }
  static BLINK_FN LruEntry* lru(const State& s) { return s.window_lru; }
  static BLINK_FN uint32_t lru_entries(const State& s) { return s.geometry.window_lru_entries; }
  static BLINK_FN int32_t* table(const State& s, uint32_t slot) { return window_table(s, slot); }
  static BLINK_FN PoolCounts counts(State& s) {
    return {s.num_free_window_blocks, s.num_evictable_window_blocks, s.window_lru_head, s.window_lru_count,
            s.next_window_stamp};
  }
  static BLINK_FN bool is_cached(const State& s, uint32_t block) { return s.window_owners[block] != 0; }
  // Runs on: one lane.
  static BLINK_FN void forget(State& s, uint32_t block) { detach_window(s, block); }
};

}  // namespace blink
