// SPDX-License-Identifier: Apache-2.0
// Blocks of the KV cache: reference counts, free list, prefix cache (open addressing) and its LRU queue.
//
// A block is in exactly one state: used (ref > 0), cached (ref 0, hashed, has a live LRU entry) or free (ref 0, on the
// free list). The LRU queue is a ring of (block, stamp): a hit leaves its entry behind, and an entry whose stamp is no
// longer its block's is dead, so that neither hits nor releases ever search or unlink.
// All functions run on the whole block of lanes and end with all lanes in step.
#pragma once

#include "scheduler/state.h"

namespace blink {

BLINK_FN void fail(State& s, ErrorCode code, uint32_t place, uint32_t detail) {
  if (s.failed) return;
  s.failed = 1;
  s.engine_state = uint32_t(EngineState::kFailed);
  s.control->error_place = place;
  s.control->error_detail = detail;
  store_release(s.control->error_code, uint32_t(code));
  store_release(s.control->state, uint32_t(EngineState::kFailed));
}

BLINK_FN int32_t* block_table(const State& s, uint32_t slot) {
  return s.block_tables + uint64_t(slot) * s.geometry.max_blocks;
}
BLINK_FN Hash* slot_hashes(const State& s, uint32_t slot) {
  return s.slot_hashes + uint64_t(slot) * s.geometry.max_blocks;
}
BLINK_FN uint32_t available_blocks(const State& s) { return s.num_free_blocks + s.num_evictable; }

// Open addressing with linear probing; removal shifts back, so there are no tombstones.
BLINK_FN uint32_t hash_home(const State& s, Hash h) { return uint32_t(h.low) & (s.geometry.hash_entries - 1); }

// Position of the hash, or of the empty entry where it would go.
BLINK_FN uint32_t hash_find(const State& s, Hash h) {
  const uint32_t mask = s.geometry.hash_entries - 1;
  uint32_t at = hash_home(s, h);
  while (s.hash_table[at] != 0 && !(s.block_hashes[s.hash_table[at] - 1] == h)) at = (at + 1) & mask;
  return at;
}

// Make the block findable, unless an equal block already is. Runs on: one lane.
BLINK_FN void hash_insert(State& s, Hash h, uint32_t block) {
  const uint32_t at = hash_find(s, h);
  if (s.hash_table[at] != 0 || s.block_hashed[block]) return;
  s.hash_table[at] = block + 1;
  s.block_hashes[block] = h;
  s.block_hashed[block] = 1;
}

// Runs on: one lane. Fails: stops the scheduler if the block is not in the table.
BLINK_FN void hash_remove(State& s, uint32_t block) {
  const uint32_t mask = s.geometry.hash_entries - 1;
  uint32_t hole = hash_find(s, s.block_hashes[block]);
  s.block_hashed[block] = 0;
  if (s.hash_table[hole] != block + 1) return fail(s, ErrorCode::kHashTableCorrupt, __LINE__, block);
  for (uint32_t at = (hole + 1) & mask; s.hash_table[at] != 0; at = (at + 1) & mask) {
    const uint32_t home = hash_home(s, s.block_hashes[s.hash_table[at] - 1]);
    if (((at - home) & mask) < ((at - hole) & mask)) continue;
    s.hash_table[hole] = s.hash_table[at];
    hole = at;
  }
  s.hash_table[hole] = 0;
}

BLINK_FN bool lru_live(const State& s, LruEntry e) {
  return s.ref_counts[e.block] == 0 && s.block_hashed[e.block] && s.block_stamps[e.block] == e.stamp;
}

// Move up to `wanted` cached blocks, least recently used first, to the free list.
template <class Env>
BLINK_FN void evict(Env& env, State& s, uint32_t wanted) {
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
BLINK_FN void compact_lru(Env& env, State& s) {
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
BLINK_FN void release_blocks(Env& env, State& s, uint32_t slot, uint32_t count) {
  const uint32_t mask = s.geometry.lru_entries - 1;
  if (s.lru_count + count > s.geometry.lru_entries) compact_lru(env, s);
  for (uint32_t tile = 0; tile < count; tile += env.lanes()) {
    const uint32_t i = tile + env.lane();
    const bool active = i < count;
    const uint32_t block = active ? uint32_t(block_table(s, slot)[count - 1 - i]) : 0;
    const uint32_t refs = active ? env.fetch_add(s.ref_counts[block], kNone) : 2;
    const bool idle = refs == 1;
    if (refs == 0) fail(s, ErrorCode::kRefCountCorrupt, __LINE__, block);
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
BLINK_FN void allocate_blocks(Env& env, State& s, uint32_t slot, uint32_t have, uint32_t extra) {
  if (s.num_free_blocks < extra) evict(env, s, extra - s.num_free_blocks);
  if (s.num_free_blocks < extra) {
    env.sync();
    if (env.lane() == 0) fail(s, ErrorCode::kFreeListCorrupt, __LINE__, extra);
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

struct PrefixHit {
  uint32_t blocks;     // leading blocks found, written to the slot's block table
  uint32_t evictable;  // how many of them nobody uses now; repeated ones count again
};

// Find the longest cached prefix among the slot's first `num_hashes` blocks. Changes nothing but the slot's block
// table.
template <class Env>
BLINK_FN PrefixHit find_prefix(Env& env, State& s, uint32_t slot, uint32_t num_hashes) {
  PrefixHit hit{0, 0};
  for (uint32_t tile = 0; tile < num_hashes; tile += env.lanes()) {
    const uint32_t i = tile + env.lane();
    uint32_t entry = 0;
    if (i < num_hashes) entry = s.hash_table[hash_find(s, slot_hashes(s, slot)[i])];
    if (entry != 0) block_table(s, slot)[i] = int32_t(entry - 1);
    const uint32_t end = env.least(entry != 0 ? kNone : least(i, num_hashes));
    hit.blocks = least(end, least(num_hashes, tile + env.lanes()));
    hit.evictable += env.sum(uint32_t(entry != 0 && i < hit.blocks && s.ref_counts[entry - 1] == 0));
    if (hit.blocks < tile + env.lanes()) break;
  }
  return hit;
}

// Take a reference on the blocks that find_prefix() found. They may repeat: a frontend can send any hashes.
template <class Env>
BLINK_FN void acquire_prefix(Env& env, State& s, uint32_t slot, PrefixHit hit) {
  uint32_t revived = 0;
  for (uint32_t i = env.lane(); i < hit.blocks; i += env.lanes())
    revived += env.fetch_add(s.ref_counts[block_table(s, slot)[i]], 1) == 0;
  revived = env.sum(revived);
  if (env.lane() == 0) s.num_evictable -= revived;
  env.sync();
}

}  // namespace blink
