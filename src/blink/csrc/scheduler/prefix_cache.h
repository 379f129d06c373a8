// SPDX-License-Identifier: Apache-2.0
// Prefixes in the KV cache. Those of prompts are found when a sequence is admitted. The blocks of prompts and answers
// are registered when a step fills them. All functions run on the whole block of lanes and end with all lanes in step.
#pragma once

#include "scheduler/block_hash.h"
#include "scheduler/snapshots.h"
#include "scheduler/windows.h"

namespace blink {

BLINK_FN Hash* slot_hashes(const State& s, uint32_t slot) {
  return s.slot_hashes + uint64_t(slot) * s.geometry.max_blocks;
}

struct PrefixHit {
  uint32_t blocks = 0;             // leading blocks found, written to the slot's block table
  uint32_t evictable = 0;          // how many of them nobody uses now
  uint32_t window_blocks = 0;      // the last of them, whose window blocks the next query sees
  uint32_t evictable_windows = 0;  // how many of these nobody uses now
  uint32_t host_blocks = 0;        // blocks behind them, or of them, in host memory (host_restore.h)
};

// What the chain of a slot's blocks begins with: those of different SlotParams::content have different keys and values.
BLINK_FN Registration chain_start(const State& s, uint32_t slot) { return {kNone, s.params[slot].content}; }

// Whether a registered block follows `parent` and holds the tokens of block `i` of the slot's prompt. Hashes alone
// prove nothing: frontends send them.
BLINK_FN bool continues(const State& s, uint32_t block, Registration parent, uint32_t slot, uint32_t i) {
  if (!(s.block_parents[block] == parent)) return false;
  const int32_t* tokens = s.tokens + uint64_t(slot) * s.geometry.max_model_len + uint64_t(i) * s.geometry.block_size;
  uint32_t differing = 0;
  for (uint32_t k = 0; k < s.geometry.block_size; k++) differing += block_tokens(s, block)[k] != tokens[k];
  return differing == 0;
}

// Find the longest cached prefix among the slot's first `num_hashes` blocks. Changes nothing but the slot's block
// table. Each block is compared with the one found before it, all at once: the chain holds as far as every link does.
template <class Env>
BLINK_RARE_FN PrefixHit find_prefix(Env& env, State& s, uint32_t slot, uint32_t num_hashes) {
  PrefixHit hit;
  int32_t* table = block_table(s, slot);
  for (uint32_t tile = 0; tile < num_hashes; tile += env.lanes()) {
    const uint32_t i = tile + env.lane();
    uint32_t entry = 0;
    if (i < num_hashes) entry = s.hash_table[hash_find(s, slot_hashes(s, slot)[i])];
    if (i < num_hashes) table[i] = int32_t(entry) - 1;
    env.sync();  // the block before was found by another lane
    bool found = entry != 0 && (i == 0 || table[i - 1] >= 0);
    if (found)
      found =
          continues(s, entry - 1, i == 0 ? chain_start(s, slot) : registration_of(s, uint32_t(table[i - 1])), slot, i);
    const uint32_t end = env.least(found ? kNone : least(i, num_hashes));
    hit.blocks = least(end, least(num_hashes, tile + env.lanes()));
    if (i < num_hashes && i >= hit.blocks) table[i] = 0;  // a table holds blocks, also where nobody should look
    hit.evictable += env.sum(uint32_t(found && i < hit.blocks && s.ref_counts[entry - 1] == 0));
    if (hit.blocks < tile + env.lanes()) break;
  }
  return hit;
}

// Whether a sequence can begin behind so many registered blocks: states of recurrent layers are kept of that place, and
// window blocks of all that its queries see.
BLINK_FN bool is_usable(const State& s, const int32_t* table, uint32_t blocks) {
  if (has_snapshots(s) && s.block_snapshots[table[blocks - 1]] == 0) return false;
  return !has_windows(s) || has_window_behind(s, blocks);
}

// Return a prefix as far as all that layers keep of it is there.
template <class Env>
BLINK_RARE_FN PrefixHit cut_to_usable(Env& env, State& s, uint32_t slot, PrefixHit hit) {
  int32_t* table = block_table(s, slot);
  if (has_windows(s)) count_lost_windows(env, s, table, hit.blocks);
  PrefixHit usable;
  for (uint32_t i = env.lane(); i < hit.blocks; i += env.lanes())
    if (is_usable(s, table, i + 1)) usable.blocks = i + 1;
  usable.blocks = env.most(usable.blocks);
  if (has_windows(s)) usable.window_blocks = usable.blocks - blocks_behind(s, usable.blocks * s.geometry.block_size);
  for (uint32_t i = env.lane(); i < usable.blocks; i += env.lanes()) {
    usable.evictable += s.ref_counts[table[i]] == 0;
    if (i + usable.window_blocks >= usable.blocks)
      usable.evictable_windows += s.window_refs[s.block_windows[table[i]] - 1] == 0;
  }
  for (uint32_t i = usable.blocks + env.lane(); i < hit.blocks; i += env.lanes()) table[i] = 0;
  usable.evictable = env.sum(usable.evictable);
  if (has_windows(s)) usable.evictable_windows = env.sum(usable.evictable_windows);
  env.sync();
  return usable;
}

// Take a reference on the blocks that find_prefix() found.
template <class Env>
BLINK_FN void acquire_prefix(Env& env, State& s, uint32_t slot, PrefixHit hit) {
  uint32_t revived = 0;
  for (uint32_t i = env.lane(); i < hit.blocks; i += env.lanes())
    revived += env.fetch_add(s.ref_counts[block_table(s, slot)[i]], 1) == 0;
  revived = env.sum(revived);
  if (env.lane() == 0) s.num_evictable -= revived;
  env.sync();
  if (has_windows(s)) acquire_windows(env, s, slot, hit.blocks, hit.window_blocks);
}

// Make a block unknown to the cache. Runs on: one lane.
BLINK_FN void forget(State& s, uint32_t block) {
  hash_remove(s, block);
  if (s.ref_counts[block] > 0) return;
  s.free_blocks[s.num_free_blocks++] = block;  // its entry of the LRU queue is dead now
  s.num_evictable--;
  s.statistics.evicted_blocks++;
}

// Register block `i` of a sequence, whose tokens are in place, or go on from its equal that is registered. A block with
// the same hash that is not its equal gives way: it was forged, or follows one that was evicted. Runs on: one lane.
BLINK_FN void register_block(State& s, Sequence& q, uint32_t i) {
  const uint32_t block = uint32_t(block_table(s, q.slot)[i]);
  const Hash hash = slot_hashes(s, q.slot)[i];
  if (const uint32_t entry = s.hash_table[hash_find(s, hash)]; entry != 0) {
    if (continues(s, entry - 1, q.chain, q.slot, i)) {
      q.chain = registration_of(s, entry - 1);
      return;
    }
    forget(s, entry - 1);
  }
  hash_insert(s, hash, block);
  s.block_ids[block] = {block, ++s.block_registrations[block]};
  s.block_parents[block] = q.chain;
  if (has_events(s))
    log_registration(s, block, i == 0 ? kNone : find_registered(s, slot_hashes(s, q.slot)[i - 1], q.chain));
  q.chain = registration_of(s, block);
}

// Whether the blocks of the answer are cached too, behind those of the prompt.
BLINK_FN bool caches_answer(const State& s, const Sequence& q) {
  const Hash root = hash_of_bytes(q.sqe.hash_root);
  return (root.low | root.high) != 0 && q.sqe.num_hashes == q.sqe.num_prompt_tokens / s.geometry.block_size;
}

// How many leading blocks the step in flight leaves full and to be known to the cache.
BLINK_FN uint32_t full_blocks(const State& s, const Sequence& q) {
  const uint32_t full = certain_tokens(q) / s.geometry.block_size;
  return caches_answer(s, q) ? full : least(q.sqe.num_hashes, full);
}

// Hash a sequence's blocks as far as `end`; those of its prompt came with it. Runs on: one lane.
BLINK_FN void hash_up_to(State& s, Sequence& q, uint32_t end) {
  const int32_t* tokens = s.tokens + uint64_t(q.slot) * s.geometry.max_model_len;
  Hash* hashes = slot_hashes(s, q.slot);
  for (; q.num_hashed < end; q.num_hashed++) {
    const Hash before = q.num_hashed == 0 ? hash_of_bytes(q.sqe.hash_root) : hashes[q.num_hashed - 1];
    const int32_t* block = tokens + uint64_t(q.num_hashed) * s.geometry.block_size;
    hashes[q.num_hashed] = hash_block({s.hash_key_low, s.hash_key_high}, before, block, s.geometry.block_size);
  }
}

// Let the snapshots that a step writes be those of the blocks that its rows end with, unless these are not known or
// have one: once, when it is in flight and has registered its blocks.
template <class Env>
BLINK_RARE_FN void attach_snapshots(Env& env, State& s, const StepBuffers& a) {
  if (!has_snapshots(s) || env.lane() != 0) return;
  for (uint32_t row = 0; row < a.header->num_rows; row++) {
    const uint32_t target = uint32_t(a.state_targets[row]);
    if (target == 0) continue;
    const Sequence& q = s.sequences[a.rows[row].sequence];
    const uint32_t block = q.chain.block;
    const bool is_known = q.num_registered * s.geometry.block_size == certain_tokens(q) && block != kNone &&
                          s.block_hashed[block] && registration_of(s, block) == q.chain;
    const bool is_new = is_known && s.block_snapshots[block] == 0;
    if (is_new) s.block_snapshots[block] = target;
    s.snapshot_blocks[target - 1] = is_new ? block + 1 : 0;
  }
}

// Register the blocks that the launch in flight fills, the last of its step. Nobody looks them up before it is over.
template <class Env>
BLINK_RARE_FN void register_blocks(Env& env, State& s, const StepBuffers& a) {
  if (!s.geometry.prefix_caching) return;
  const uint32_t size = s.geometry.block_size;
  const auto sequence_at = [&](uint32_t row) { return described_sequence(a, row); };
  const uint32_t rows = select(env, a.header->num_rows, sequence_at, s.scratch, [&](uint32_t i) {
    if (i == kNone) return false;
    const Sequence& q = s.sequences[i];
    const bool fills = certain_tokens(q) / size > q.num_registered;  // most steps of an answer do not
    return fills && full_blocks(s, q) > q.num_registered;
  });
  for (uint32_t n = env.lane(); n < rows; n += env.lanes()) {
    Sequence& q = s.sequences[s.scratch[n]];
    hash_up_to(s, q, full_blocks(s, q));
  }
  env.sync();
  for (uint32_t n = 0; n < rows; n++) {
    Sequence& q = s.sequences[s.scratch[n]];
    const uint32_t first = q.num_registered, end = full_blocks(s, q);
    for (uint32_t at = first * size + env.lane(); at < end * size; at += env.lanes()) {
      const uint32_t block = uint32_t(block_table(s, q.slot)[at / size]);
      block_tokens(s, block)[at % size] = s.tokens[uint64_t(q.slot) * s.geometry.max_model_len + at];
    }
    env.sync();
    if (env.lane() == 0) {
      for (uint32_t i = first; i < end; i++) {
        register_block(s, q, i);
        if (has_windows(s)) attach_window(s, q.chain.block, uint32_t(window_table(s, q.slot)[i]));
      }
      q.num_registered = end;
    }
    env.sync();
  }
}

// Whether the states of a sequence are kept that has so many tokens computed: at the last full block of its prompt that
// another one may find, where a prefix that was known without states ends, and now and then in its answer.
BLINK_FN bool is_border(const State& s, const Sequence& q, uint32_t num_tokens) {
  const uint32_t size = s.geometry.block_size, prompt = q.sqe.num_prompt_tokens, blocks = num_tokens / size;
  if (!has_snapshots(s) || blocks == 0 || num_tokens % size != 0) return false;
  if (num_tokens > prompt) return blocks % s.geometry.snapshot_interval == 0 && caches_answer(s, q);
  return blocks <= q.sqe.num_hashes && (blocks == (prompt - 1) / size || num_tokens == q.split);
}

// How many tokens a row may take from `start` on, so that it ends where its states are to be kept.
BLINK_FN uint32_t tokens_to_border(const State& s, const Sequence& q, uint32_t start) {
  if (!has_snapshots(s)) return kNone;
  if (q.row.num_tokens > 0 && is_border(s, q, start)) return 0;
  const uint32_t end = (q.sqe.num_prompt_tokens - 1) / s.geometry.block_size * s.geometry.block_size;
  uint32_t border = end > start ? end : kNone;
  if (q.split > start) border = least(border, q.split);
  return border == kNone ? kNone : border - start;
}

// How many tokens may be computed behind a sequence's newest one and taken back, so that they reach no place where its
// states are to be kept.
BLINK_FN uint32_t most_uncertain_tokens(const State& s, const Sequence& q) {
  if (!has_snapshots(s) || !caches_answer(s, q)) return kNone;
  const uint32_t interval = s.geometry.snapshot_interval * s.geometry.block_size;
  return interval - 1 - q.num_tokens % interval;
}

// Say which rows of a composed step begin with a snapshot, and which end with one. All lanes see the rows by now.
template <class Env>
BLINK_RARE_FN void write_snapshots(Env& env, State& s, const StepBuffers& a, uint32_t rows) {
  if (!has_snapshots(s)) return;
  uint32_t begin = 0, end = 0;
  for (uint32_t row = env.lane(); row < rows; row += env.lanes()) {
    const bool is_first = described_sequence(a, row) != kNone;
    const Sequence& q = s.sequences[a.rows[row].sequence];
    a.state_sources[row] = is_first ? int32_t(q.snapshot) : 0;
    a.state_targets[row] = 0;
    begin += is_first && q.snapshot > 0;
    end += is_first && is_border(s, q, certain_tokens(q));
  }
  begin = env.sum(begin);
  end = env.sum(end);
  if (begin > 0 && env.lane() == 0)
    for (uint32_t row = 0; row < rows; row++) drop_snapshot(s, s.sequences[a.rows[row].sequence]);
  env.sync();
  for (uint32_t row = 0; end > 0 && row < rows; row++) {
    const uint32_t sequence = described_sequence(a, row);
    if (sequence == kNone || !is_border(s, s.sequences[sequence], certain_tokens(s.sequences[sequence]))) continue;
    const uint32_t index = take_snapshot(env, s);
    if (env.lane() == 0) a.state_targets[row] = int32_t(index + 1);  // 0 of kNone
    env.sync();
  }
}

// Count what was found of a prompt. Runs on: one lane.
BLINK_FN void count_lookup(State& s, const Sequence& q, uint32_t found) {
  if (!s.geometry.prefix_caching) return;
  s.statistics.prefix_queries += q.sqe.num_prompt_tokens;
  s.statistics.prefix_hits += found;
  if (q.sqe.service_class != uint32_t(ServiceClass::kBestEffort)) return;
  s.statistics.best_effort_prefix_queries += q.sqe.num_prompt_tokens;
  s.statistics.best_effort_prefix_hits += found;
}

}  // namespace blink
