// SPDX-License-Identifier: Apache-2.0
// Blocks of the KV cache: reference counts, free list, and the LRU queue of those that the prefix cache keeps.
//
// A block is in exactly one state: used (ref > 0), cached (ref 0, hashed, has a live LRU entry) or free (ref 0, on the
// free list). The LRU queue is a ring of (block, stamp): a hit leaves its entry there. An entry whose stamp is no
// longer its block's is dead, so that neither hits nor releases ever search or unlink. All functions run on the whole
// block of lanes and end with all lanes in step.
#pragma once

#include "scheduler/hash_table.h"

namespace blink {

BLINK_FN int32_t* block_table(const State& s, uint32_t slot) {
  return s.block_tables + uint64_t(slot) * s.geometry.max_blocks;
}
BLINK_FN uint32_t available_blocks(const State& s) { return s.num_free_blocks + s.num_evictable; }

BLINK_FN bool lru_live(const State& s, LruEntry e) {
  return s.ref_counts[e.block] == 0 && s.block_hashed[e.block] && s.block_stamps[e.block] == e.stamp;
}

// Move up to `wanted` cached blocks, least recently used first, to the free list.
template <class Env>
BLINK_RARE_FN void evict(Env& env, State& s, uint32_t wanted) {
  const uint32_t mask = s.geometry.lru_entries - 1;
  while (wanted > 0 && s.lru_count > 0) {
    const uint32_t lane = env.lane();
    const uint32_t count = least(s.lru_count, env.lanes());
    LruEntry entry{};
    if (lane < count) entry = s.lru[(s.lru_head + lane) & mask];
    const bool live = lane < count && lru_live(s, entry);
    uint32_t total = 0;
    const uint32_t rank = env.scan(live, total);
    const bool take = live && rank < wanted;
    if (take) s.victims[rank] = entry.block;
    const uint32_t consumed = total <= wanted ? count : env.most(take ? lane + 1 : 0);
    const uint32_t taken = least(total, wanted);
    env.sync();
    if (lane == 0) {
      for (uint32_t i = 0; i < taken; i++) {
        hash_remove(s, s.victims[i]);
        s.free_blocks[s.num_free_blocks++] = s.victims[i];
      }
      s.num_evictable -= taken;
      s.statistics.evicted_blocks += taken;
      s.lru_head += consumed;
      s.lru_count -= consumed;
    }
    env.sync();
    wanted -= taken;
  }
}

// Drop the dead entries of the LRU ring, keeping the order of the live ones.
template <class Env>
BLINK_RARE_FN void compact_lru(Env& env, State& s) {
  const uint32_t mask = s.geometry.lru_entries - 1;
  const uint32_t head = s.lru_head, count = s.lru_count;
  uint32_t kept = 0;
  for (uint32_t tile = 0; tile < count; tile += env.lanes()) {
    const uint32_t i = tile + env.lane();
    LruEntry entry{};
    if (i < count) entry = s.lru[(head + i) & mask];
    const bool live = i < count && lru_live(s, entry);
    uint32_t total = 0;
    const uint32_t rank = env.scan(live, total);
    if (live) s.lru[(head + kept + rank) & mask] = entry;
    kept += total;
    env.sync();
  }
  if (env.lane() == 0) s.lru_count = kept;
  env.sync();
}

// Give back the slot's first `count` blocks, the last first, so that the ends of prompts are evicted before their
// starts.
template <class Env>
BLINK_RARE_FN void release_blocks(Env& env, State& s, uint32_t slot, uint32_t count) {
  const uint32_t mask = s.geometry.lru_entries - 1;
  if (s.lru_count + count > s.geometry.lru_entries) compact_lru(env, s);
  for (uint32_t tile = 0; tile < count; tile += env.lanes()) {
    const uint32_t i = tile + env.lane();
    const bool active = i < count;
    const uint32_t block = active ? uint32_t(block_table(s, slot)[count - 1 - i]) : 0;
    const uint32_t refs = active ? env.fetch_add(s.ref_counts[block], kNone) : 2;
    const bool idle = refs == 1;
    if (refs == 0) fail(s, ErrorCode::kRefCountCorrupt, BLINK_HERE, block);
    const bool cached = idle && s.block_hashed[block];
    uint32_t num_cached = 0, num_plain = 0;
    const uint32_t lru_rank = env.scan(cached, num_cached);
    const uint32_t free_rank = env.scan(idle && !cached, num_plain);
    if (cached) {
      s.block_stamps[block] = s.next_stamp + lru_rank;
      s.lru[(s.lru_head + s.lru_count + lru_rank) & mask] = LruEntry{block, s.next_stamp + lru_rank};
    } else if (idle) {
      s.free_blocks[s.num_free_blocks + free_rank] = block;
    }
    env.sync();
    if (env.lane() == 0) {
      s.lru_count += num_cached;
      s.next_stamp += num_cached;
      s.num_evictable += num_cached;
      s.num_free_blocks += num_plain;
    }
    env.sync();
  }
}

// Append `extra` fresh blocks to the slot's table. The caller has checked available_blocks().
template <class Env>
BLINK_RARE_FN void allocate_blocks(Env& env, State& s, uint32_t slot, uint32_t have, uint32_t extra) {
  if (s.num_free_blocks < extra) evict(env, s, extra - s.num_free_blocks);
  if (s.num_free_blocks < extra) {
    env.sync();
    if (env.lane() == 0) fail(s, ErrorCode::kFreeListCorrupt, BLINK_HERE, extra);
    env.sync();
    return;
  }
  for (uint32_t i = env.lane(); i < extra; i += env.lanes()) {
    const uint32_t block = s.free_blocks[s.num_free_blocks - 1 - i];
    block_table(s, slot)[have + i] = int32_t(block);
    s.ref_counts[block] = 1;
  }
  env.sync();
  if (env.lane() == 0) s.num_free_blocks -= extra;
  env.sync();
}

}  // namespace blink
