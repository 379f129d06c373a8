// SPDX-License-Identifier: Apache-2.0
// Window blocks: keys and values of layers whose queries see only the newest tokens. Those that no later query sees go
// back to their pool while the sequence runs. A prefix is found only as far as the window blocks are there that the
// next query sees.
//
// A window block is of one registered block, which has the same tokens, or nobody's. A sequence is its user by its
// table of window blocks, whatever block of its own has these tokens. Functions with an Env run on the whole block of
// lanes and end with all lanes in step.
#pragma once

#include "scheduler/kv_cache.h"
#include "scheduler/list.h"

namespace blink {

// How many leading blocks no query sees from a position on.
BLINK_FN uint32_t blocks_behind(const State& s, uint32_t position) {
  const uint32_t seen = s.geometry.window - 1;  // tokens before the query's own
  return position > seen ? (position - seen) / s.geometry.block_size : 0;
}

// The most window blocks that one sequence has: of what its queries see, and of the longest chunk of a prompt.
BLINK_FN uint32_t most_window_blocks(const Geometry& g) {
  return ceil_div(g.window - 1 + kRollbackTokens + g.max_num_batched_tokens, g.block_size) + 1;
}

// Window blocks that a sequence will take for so many tokens in `extra` more blocks, where a hit gives it some.
BLINK_FN uint32_t missing_windows(const State& s, const Sequence& q, uint32_t extra, uint32_t hit) {
  const uint32_t most_blocks = most_window_blocks(s.geometry), has = q.num_blocks - q.num_freed + hit;
  return least(extra, most_blocks - least(has, most_blocks));
}

// Let the prefix cache find a window block of some sequence by a registered block of the same tokens, unless that has
// one. Runs on: one lane.
BLINK_FN void attach_window(State& s, uint32_t block, uint32_t window) {
  if (s.block_windows[block] != 0 || s.window_owners[window] != 0) return;
  s.block_windows[block] = window + 1;
  s.window_owners[window] = block + 1;
}

// Note in s.victims, for each n up to `count`, how many of the first n registered blocks of a table have no window
// block.
template <class Env>
BLINK_RARE_FN void count_lost_windows(Env& env, State& s, const int32_t* table, uint32_t count) {
  uint32_t lost = 0;
  for (uint32_t tile = 0; tile <= count; tile += env.lanes()) {
    const uint32_t i = tile + env.lane();
    uint32_t total = 0;
    const uint32_t before = lost + env.scan(i < count && s.block_windows[table[i]] == 0, total);
    if (i <= count) s.victims[i] = before;
    lost += total;
  }
  env.sync();
}

// Whether the window blocks are there that a sequence needs behind so many blocks. After count_lost_windows().
BLINK_FN bool has_window_behind(const State& s, uint32_t blocks) {
  return s.victims[blocks] == s.victims[blocks_behind(s, blocks * s.geometry.block_size)];
}

// Take a reference on the last `window_blocks` window blocks of a prefix that was found.
template <class Env>
BLINK_RARE_FN void acquire_windows(Env& env, State& s, uint32_t slot, uint32_t blocks, uint32_t window_blocks) {
  uint32_t revived = 0;
  for (uint32_t i = env.lane(); i < blocks; i += env.lanes()) {
    const bool is_seen = i + window_blocks >= blocks;
    const uint32_t window = is_seen ? s.block_windows[block_table(s, slot)[i]] - 1 : 0;
    window_table(s, slot)[i] = int32_t(window);  // a table holds blocks, also where nobody should look
    if (is_seen) revived += env.fetch_add(s.window_refs[window], 1) == 0;
  }
  revived = env.sum(revived);
  if (env.lane() == 0) s.num_evictable_window_blocks -= revived;
  env.sync();
}

// How many leading blocks of a sequence need no window block once the launch in flight, its row's last, is over.
BLINK_FN uint32_t blocks_to_free(const State& s, const Sequence& q) {
  const uint32_t tokens = computed_tokens(q);
  return blocks_behind(s, tokens - least(tokens, kRollbackTokens));
}

// Give back the window blocks that the rows of the launch in flight, the last of its step, leave behind their windows.
// Nobody writes them before it is over.
template <class Env>
BLINK_RARE_FN void release_windows(Env& env, State& s, const StepBuffers& a) {
  if (!has_windows(s)) return;
  const auto sequence_at = [&](uint32_t row) { return described_sequence(a, row); };
  const uint32_t rows = select(env, a.header->num_rows, sequence_at, s.scratch, [&](uint32_t i) {
    return i != kNone && blocks_to_free(s, s.sequences[i]) > s.sequences[i].num_freed;
  });
  for (uint32_t n = 0; n < rows; n++) {
    Sequence& q = s.sequences[s.scratch[n]];
    const uint32_t end = blocks_to_free(s, q);
    release_blocks<WindowPool>(env, s, q.slot, q.num_freed, end);
    if (env.lane() == 0) q.num_freed = end;
    env.sync();
  }
}

}  // namespace blink
