// SPDX-License-Identifier: Apache-2.0
// The prefixes of prompts in the KV cache: found when a sequence is admitted, registered when a step fills their
// blocks. All functions run on the whole block of lanes and end with all lanes in step.
#pragma once

#include "scheduler/kv_cache.h"
#include "scheduler/list.h"

namespace blink {

BLINK_FN Hash* slot_hashes(const State& s, uint32_t slot) {
  return s.slot_hashes + uint64_t(slot) * s.geometry.max_blocks;
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

// Register the blocks that the step in flight fills. Nobody looks them up before that step is over.
template <class Env>
BLINK_FN void register_blocks(Env& env, State& s) {
  if (!s.geometry.prefix_caching) return;
  const auto filled = [&](const Sequence& q) {
    return least(q.sqe.num_hashes, (q.num_computed + q.scheduled) / s.geometry.block_size);
  };
  const uint32_t rows = compact(env, s.row_sequences, s.batch->num_rows, s.scratch,
                                [&](uint32_t i) { return filled(s.sequences[i]) > s.sequences[i].num_registered; });
  if (env.lane() == 0) {
    for (uint32_t n = 0; n < rows; n++) {
      Sequence& q = s.sequences[s.scratch[n]];
      for (uint32_t i = q.num_registered; i < filled(q); i++)
        hash_insert(s, slot_hashes(s, q.slot)[i], uint32_t(block_table(s, q.slot)[i]));
      q.num_registered = filled(q);
    }
  }
  env.sync();
}

}  // namespace blink
