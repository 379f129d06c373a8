// SPDX-License-Identifier: Apache-2.0
// Blocks of the KV cache: reference counts, free list, and the LRU queue of those that the prefix cache keeps. Each
// function takes the pool (block_pool.h) that it works on.
//
// A block is in exactly one state. It is used (ref > 0), cached (ref 0, known to the prefix cache, has a live LRU
// entry), or free (ref 0, on the free list). The LRU queue is a ring of (block, stamp): a hit leaves its entry there.
// An entry whose stamp is no longer its block's is dead, so that neither hits nor releases ever search or unlink. All
// functions run on the whole block of lanes and end with all lanes in step.
#pragma once

#include "scheduler/block_pool.h"

namespace blink {

BLINK_FN bool has_windows(const State& s) { return s.geometry.num_window_blocks > 0; }

BLINK_FN uint32_t available_blocks(const State& s) { return s.num_free_blocks + s.num_evictable; }
BLINK_FN uint32_t available_window_blocks(const State& s) {
  return s.num_free_window_blocks + s.num_evictable_window_blocks;
}
// How many blocks sequences can grow by: each with a window block, where the model has windows.
BLINK_FN uint32_t available_growth(const State& s) {
  return has_windows(s) ? least(available_blocks(s), available_window_blocks(s)) : available_blocks(s);
}

template <class Pool>
BLINK_FN bool lru_live(const State& s, LruEntry e) {
  return Pool::refs(s)[e.block] == 0 && Pool::is_cached(s, e.block) && Pool::stamps(s)[e.block] == e.stamp;
}

// Move up to `wanted` cached blocks, least recently used first, to the free list.
template <class Pool, class Env>
BLINK_RARE_FN void evict(Env& env, State& s, uint32_t wanted) {
  const uint32_t mask = Pool::lru_entries(s) - 1;
  const PoolCounts counts = Pool::counts(s);
  while (wanted > 0 && counts.lru_count > 0) {
    const uint32_t lane = env.lane();
    const uint32_t count = least(counts.lru_count, env.lanes());
    LruEntry entry{};
    if (lane < count) entry = Pool::lru(s)[(counts.lru_head + lane) & mask];
    const bool live = lane < count && lru_live<Pool>(s, entry);
    uint32_t total = 0;
    const uint32_t rank = env.scan(live, total);
    const bool take = live && rank < wanted;
    if (take) s.victims[rank] = entry.block;
    const uint32_t consumed = total < wanted ? count : env.most(take ? lane + 1 : 0);
    const uint32_t taken = least(total, wanted);
    env.sync();
    if (lane == 0) {
      for (uint32_t i = 0; i < taken; i++) {
        Pool::forget(s, s.victims[i]);
        Pool::free(s)[counts.num_free++] = s.victims[i];
      }
      counts.num_evictable -= taken;
      counts.lru_head += consumed;
      counts.lru_count -= consumed;
    }
    env.sync();
    wanted -= taken;
  }
}

// Drop the dead entries of the LRU ring, keeping the order of the live ones.
template <class Pool, class Env>
BLINK_RARE_FN void compact_lru(Env& env, State& s) {
  const uint32_t mask = Pool::lru_entries(s) - 1;
  const PoolCounts counts = Pool::counts(s);
  const uint32_t head = counts.lru_head, count = counts.lru_count;
  uint32_t kept = 0;
  for (uint32_t tile = 0; tile < count; tile += env.lanes()) {
    const uint32_t i = tile + env.lane();
    LruEntry entry{};
    if (i < count) entry = Pool::lru(s)[(head + i) & mask];
    const bool live = i < count && lru_live<Pool>(s, entry);
    uint32_t total = 0;
    const uint32_t rank = env.scan(live, total);
    if (live) Pool::lru(s)[(head + kept + rank) & mask] = entry;
    kept += total;
    env.sync();
  }
  if (env.lane() == 0) counts.lru_count = kept;
  env.sync();
}

// Give back the slot's blocks from `first` up to `end`, the last first, so that the ends of prompts are evicted before
// their starts.
template <class Pool, class Env>
BLINK_RARE_FN void release_blocks(Env& env, State& s, uint32_t slot, uint32_t first, uint32_t end) {
  const uint32_t mask = Pool::lru_entries(s) - 1, count = end - first;
  const PoolCounts counts = Pool::counts(s);
  if (counts.lru_count + count > Pool::lru_entries(s)) compact_lru<Pool>(env, s);
  for (uint32_t tile = 0; tile < count; tile += env.lanes()) {
    const uint32_t i = tile + env.lane();
    const bool active = i < count;
    const uint32_t block = active ? uint32_t(Pool::table(s, slot)[end - 1 - i]) : 0;
    const uint32_t refs = active ? env.fetch_add(Pool::refs(s)[block], kNone) : 2;
    const bool idle = refs == 1;
    if (refs == 0) fail(s, ErrorCode::kRefCountCorrupt, BLINK_HERE, block);
    const bool cached = idle && Pool::is_cached(s, block);
    uint32_t num_cached = 0, num_plain = 0;
    const uint32_t lru_rank = env.scan(cached, num_cached);
    const uint32_t free_rank = env.scan(idle && !cached, num_plain);
    if (cached) {
      Pool::stamps(s)[block] = counts.next_stamp + lru_rank;
      Pool::lru(s)[(counts.lru_head + counts.lru_count + lru_rank) & mask] =
          LruEntry{block, counts.next_stamp + lru_rank};
    } else if (idle) {
      Pool::free(s)[counts.num_free + free_rank] = block;
    }
    env.sync();
    if (env.lane() == 0) {
      counts.lru_count += num_cached;
      counts.next_stamp += num_cached;
      counts.num_evictable += num_cached;
      counts.num_free += num_plain;
    }
    env.sync();
  }
}

// Give back all blocks of a sequence, of both pools.
template <class Env>
BLINK_FN void release_all_blocks(Env& env, State& s, const Sequence& q) {
  if (has_windows(s)) release_blocks<WindowPool>(env, s, q.slot, q.num_freed, q.num_blocks);
  release_blocks<FullPool>(env, s, q.slot, 0, q.num_blocks);
}

// Append `extra` fresh blocks to the slot's table. The caller has checked available_growth().
template <class Pool, class Env>
BLINK_RARE_FN void allocate_blocks(Env& env, State& s, uint32_t slot, uint32_t have, uint32_t extra) {
  const PoolCounts counts = Pool::counts(s);
  if (counts.num_free < extra) evict<Pool>(env, s, extra - counts.num_free);
  if (counts.num_free < extra) {
    env.sync();
    if (env.lane() == 0) fail(s, ErrorCode::kFreeListCorrupt, BLINK_HERE, extra);
    env.sync();
    return;
  }
  for (uint32_t i = env.lane(); i < extra; i += env.lanes()) {
    const uint32_t block = Pool::free(s)[counts.num_free - 1 - i];
    Pool::table(s, slot)[have + i] = int32_t(block);
    Pool::refs(s)[block] = 1;
  }
  env.sync();
  if (env.lane() == 0) counts.num_free -= extra;
  env.sync();
}

// Let a sequence grow by `extra` blocks.
template <class Env>
BLINK_FN void grow(Env& env, State& s, const Sequence& q, uint32_t extra) {
  allocate_blocks<FullPool>(env, s, q.slot, q.num_blocks, extra);
  if (has_windows(s)) allocate_blocks<WindowPool>(env, s, q.slot, q.num_blocks, extra);
}

// Evict cached blocks until `wanted` are free in each pool, as far as there are such.
template <class Env>
BLINK_FN void keep_free(Env& env, State& s, uint32_t wanted) {
  if (s.num_free_blocks < wanted) evict<FullPool>(env, s, wanted - s.num_free_blocks);
  if (has_windows(s) && s.num_free_window_blocks < wanted) evict<WindowPool>(env, s, wanted - s.num_free_window_blocks);
}

}  // namespace blink
