// SPDX-License-Identifier: Apache-2.0
// Empty the prefix cache at a frontend's wish. Sequences that run keep their blocks, but nobody finds them any more.
#pragma once

#include "scheduler/kv_cache.h"

namespace blink {

// Let all window blocks be nobody's; those that no sequence uses become free.
template <class Env>
BLINK_RARE_FN void reset_window_blocks(Env& env, State& s) {
  uint32_t freed = 0;
  for (uint32_t tile = 0; tile < s.geometry.num_window_blocks; tile += env.lanes()) {
    const uint32_t block = tile + env.lane();
    const bool owned = block < s.geometry.num_window_blocks && s.window_owners[block] != 0;
    const bool idle = owned && s.window_refs[block] == 0;
    uint32_t count = 0;
    const uint32_t rank = freed + env.scan(idle, count);
    if (owned) s.window_owners[block] = 0;
    if (idle) s.free_window_blocks[s.num_free_window_blocks + rank] = block;
    freed += count;
  }
  env.sync();
  if (env.lane() == 0) {
    s.num_free_window_blocks += freed;
    s.num_evictable_window_blocks = s.window_lru_count = 0;
  }
  env.sync();
}

// Done behind a launch or when idle, so that no step waits for it. Runs on: the whole block, which ends in step.
template <class Env>
BLINK_RARE_FN void reset_prefix_cache(Env& env, State& s) {
  for (uint32_t at = env.lane(); at < s.geometry.hash_entries; at += env.lanes()) s.hash_table[at] = 0;
  for (uint32_t at = env.lane(); at < s.geometry.host_hash_entries; at += env.lanes()) s.host.table[at] = 0;
  for (uint32_t at = env.lane(); at < s.geometry.num_host_blocks; at += env.lanes())
    s.host.marks[at] = HostMark::kEmpty;
  if (has_windows(s)) reset_window_blocks(env, s);
  uint32_t freed = 0;
  for (uint32_t tile = 0; tile < s.geometry.num_blocks; tile += env.lanes()) {
    const uint32_t block = tile + env.lane();
    const bool hashed = block < s.geometry.num_blocks && s.block_hashed[block];
    const bool idle = hashed && s.ref_counts[block] == 0;
    uint32_t count = 0;
    const uint32_t rank = freed + env.scan(idle, count);
    if (hashed) s.block_hashed[block] = 0;
    if (hashed) forget_snapshot(s, block);
    if (hashed && has_events(s)) s.events.links[block] = BlockLink{};
    if (hashed && has_windows(s)) s.block_windows[block] = 0;
    if (idle) s.free_blocks[s.num_free_blocks + rank] = block;
    freed += count;
  }
  env.sync();
  if (env.lane() == 0) {
    s.num_free_blocks += freed;
    s.num_evictable = s.lru_count = s.reset_asked = 0;
    if (has_events(s)) log_reset(s);
    s.statistics.num_host_blocks_used = 0;
    s.statistics.prefix_resets++;
    s.stats_dirty = 1;
  }
  env.sync();
}

}  // namespace blink
