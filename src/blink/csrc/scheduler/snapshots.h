// SPDX-License-Identifier: Apache-2.0
// Snapshots of recurrent states, for the prefix cache: what a sequence's slot held where a registered block ends. The
// KV of a prefix alone is of no use to a recurrent layer, so a prefix is found only as far as a snapshot.
//
// A snapshot is free, of one registered block, or nobody's: a step writes it, or a sequence is to begin with it whose
// block was forgotten. A step copies from snapshots before its first layer, and to snapshots after its last.
#pragma once

#include "scheduler/hash_table.h"

namespace blink {

BLINK_FN bool has_snapshots(const State& s) { return s.geometry.num_snapshots > 0 && s.geometry.prefix_caching; }

// Let a sequence that is admitted begin with the states behind a registered block. Runs on: one lane.
BLINK_FN void begin_with_snapshot(State& s, Sequence& q, uint32_t block) {
  q.snapshot = s.block_snapshots[block];
  s.snapshot_readers[q.snapshot - 1]++;
  s.snapshot_stamps[q.snapshot - 1] = ++s.snapshot_stamp;
}

// Let a sequence begin with its slot's states after all, or go on with them. Runs on: one lane.
BLINK_FN void drop_snapshot(State& s, Sequence& q) {
  if (q.snapshot == 0) return;
  const uint32_t index = q.snapshot - 1;
  q.snapshot = 0;
  if (--s.snapshot_readers[index] == 0 && s.snapshot_blocks[index] == kNone) s.snapshot_blocks[index] = 0;
}

// Take a snapshot that nobody needs, the least recently used if none is free; kNone: there is none.
template <class Env>
BLINK_RARE_FN uint32_t take_snapshot(Env& env, State& s) {
  uint32_t found = kNone, oldest = kNone;
  for (uint32_t i = env.lane(); i < s.geometry.num_snapshots; i += env.lanes()) {
    if (s.snapshot_blocks[i] == 0) found = least(found, i);
    if (s.snapshot_blocks[i] != kNone && s.snapshot_readers[i] == 0) oldest = least(oldest, s.snapshot_stamps[i]);
  }
  uint32_t index = env.least(found);
  if (index == kNone) {
    oldest = env.least(oldest);
    if (oldest == kNone) return kNone;
    for (uint32_t i = env.lane(); i < s.geometry.num_snapshots; i += env.lanes())
      if (s.snapshot_stamps[i] == oldest) found = i;
    index = env.least(found);
  }
  env.sync();
  if (env.lane() == 0) {
    if (const uint32_t block = s.snapshot_blocks[index]; block != 0) s.block_snapshots[block - 1] = 0;
    s.snapshot_blocks[index] = kNone;
    s.snapshot_stamps[index] = ++s.snapshot_stamp;
  }
  env.sync();
  return index;
}

}  // namespace blink
