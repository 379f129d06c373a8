// SPDX-License-Identifier: Apache-2.0
// The invariants of window blocks, checked from scratch. Host only.
#pragma once

#include <vector>

#include "scheduler/windows.h"

namespace blink {

// Each window block is used by the tables that hold it, cached, or free; and all that queries will see is there.
inline const char* check_window_users(const State& s) {
  const uint32_t count = s.geometry.num_window_blocks;
  std::vector<uint32_t> refs(count), free(count);
  for (uint32_t i = 0; i < num_sequences(s.geometry) && count > 0; i++) {
    const Sequence& q = s.sequences[i];
    if (q.status == SequenceStatus::kFree) continue;
    if (q.num_freed > blocks_behind(s, computed_tokens(q))) return "a window block was freed that a query sees";
    for (uint32_t b = q.num_freed; b < q.num_blocks; b++) {
      const uint32_t window = uint32_t(window_table(s, q.slot)[b]);
      if (window >= count) return "a table holds no window block";
      refs[window]++;
      if ((b + 1) * s.geometry.block_size > computed_tokens(q) && s.window_refs[window] != 1)
        return "an unfinished window block is shared";
    }
  }
  for (uint32_t i = 0; i < s.num_free_window_blocks && count > 0; i++) free[s.free_window_blocks[i]]++;
  uint32_t cached = 0, live = 0;
  for (uint32_t w = 0; w < count; w++) {
    if (refs[w] != s.window_refs[w]) return "a window block miscounts its users";
    const bool is_cached = refs[w] == 0 && s.window_owners[w] != 0;
    if (free[w] != (refs[w] == 0 && !is_cached)) return "a window block leaked or is free twice";
    cached += is_cached;
  }
  for (uint32_t i = 0; i < s.window_lru_count; i++)
    live += lru_live<WindowPool>(s, s.window_lru[(s.window_lru_head + i) & (s.geometry.window_lru_entries - 1)]);
  if (cached != s.num_evictable_window_blocks) return "the number of evictable window blocks is wrong";
  return live == cached ? nullptr : "the LRU queue misses a cached window block";
}

inline const char* check_window_owners(const State& s) {
  const bool has_owners = s.geometry.num_window_blocks > 0;
  for (uint32_t b = 0; b < s.geometry.num_blocks && has_owners; b++) {
    const uint32_t window = s.block_windows[b];
    if (window == 0) continue;
    if (!s.block_hashed[b]) return "a block that nobody finds has a window block";
    if (s.window_owners[window - 1] != b + 1) return "a block's window block is another's";
  }
  for (uint32_t w = 0; w < s.geometry.num_window_blocks; w++)
    if (s.window_owners[w] != 0 && s.block_windows[s.window_owners[w] - 1] != w + 1)
      return "a window block's owner has another";
  return nullptr;
}

inline const char* check_windows(const State& s) {
  const char* broken = check_window_users(s);
  return broken ? broken : check_window_owners(s);
}

}  // namespace blink
