// SPDX-License-Identifier: Apache-2.0
// Restores a prompt's blocks from host memory (host_tier.h): those that follow what the sequence has computed.
//
// While others decode, a step restores a few blocks, and the sequence waits for the next step. Else all are restored.
// A restored block is registered as the one that was evicted, so blocks that follow it are still found.
#pragma once

#include "scheduler/prefix_cache.h"
#include "scheduler/prompt_logprobs.h"

namespace blink {

constexpr uint32_t kRestoredOfStep = 32;  // blocks of one sequence, while others decode
constexpr uint32_t kHostBit = 1u << 31;   // in HostTier::found: a host block

// Whether a host block follows `parent` and holds the tokens of block `i` of the slot's text. Runs on: one lane.
BLINK_FN bool host_continues(const State& s, uint32_t host_block, Registration parent, uint32_t slot, uint32_t i) {
  if (!(s.host.parents[host_block] == parent)) return false;
  const int32_t* tokens = s.tokens + uint64_t(slot) * s.geometry.max_model_len + uint64_t(i) * s.geometry.block_size;
  uint32_t differing = 0;  // not until the first one: so the lane's loads do not wait for each other
  for (uint32_t k = 0; k < s.geometry.block_size; k++) differing += host_tokens(s, host_block)[k] != tokens[k];
  return differing == 0;
}

// Find the blocks of a text from block `first` on, up to `limit`, behind one registered as `parent`: for each call
// visit(block, whether it is a host block). Ends where there is none. Returns how many. Runs on: one lane.
template <class Visit>
BLINK_FN uint32_t walk_host(const State& s, uint32_t slot, uint32_t first, Registration parent, uint32_t limit,
                            Visit visit) {
  for (uint32_t n = 0; n < limit; n++) {
    const uint32_t i = first + n;
    const Hash hash = slot_hashes(s, slot)[i];
    if (const uint32_t entry = s.hash_table[hash_find(s, hash)];
        entry != 0 && continues(s, entry - 1, parent, slot, i)) {
      parent = registration_of(s, entry - 1);
      visit(entry - 1, false);
      continue;
    }
    const uint32_t entry = s.host.table[find_entry(host_table(s), hash)];
    if (entry == 0 || !host_continues(s, entry - 1, parent, slot, i)) return n;
    parent = s.host.ids[entry - 1];
    visit(entry - 1, true);
  }
  return limit;
}

// Leading blocks of a text that may be restored: one token is left to compute.
BLINK_FN uint32_t restorable_blocks(const State& s, const Sequence& q) {
  if (!has_host(s) || !s.geometry.prefix_caching || wants_prompt_logprobs(q)) return 0;
  return least(q.num_hashed, (q.num_tokens - 1) / s.geometry.block_size);
}

// How many blocks behind a prefix that was found could be restored. Runs on: one lane.
BLINK_RARE_FN uint32_t count_restorable(const State& s, const Sequence& q, uint32_t found) {
  const uint32_t end = restorable_blocks(s, q);
  if (q.num_blocks > 0 || end <= found) return 0;
  const Registration parent =
      found == 0 ? chain_start(s, q.slot) : registration_of(s, uint32_t(block_table(s, q.slot)[found - 1]));
  return walk_host(s, q.slot, found, parent, end - found, [](uint32_t, bool) {});
}

// Choose up to `limit` blocks that follow what a sequence has computed, into HostTier::found. Those of the KV cache get
// a reference, those of the host are pinned. Returns how many, and how many of the host. Runs on: one lane.
BLINK_RARE_FN PrefixHit choose_restored(State& s, const Sequence& q, uint32_t limit) {
  PrefixHit hit;
  const uint32_t first = q.num_blocks, end = restorable_blocks(s, q);
  const bool is_at_border = q.num_registered == first && q.num_computed == first * s.geometry.block_size;
  if (!is_at_border || end <= first) return hit;
  walk_host(s, q.slot, first, q.chain, least(limit, end - first), [&](uint32_t block, bool is_on_host) {
    s.host.found[hit.blocks++] = block | (is_on_host ? kHostBit : 0);
    if (is_on_host) {
      s.host.marks[block] = HostMark::kPinned;
      hit.host_blocks++;
    } else if (s.ref_counts[block]++ == 0) {
      s.num_evictable--;
    }
  });
  return hit;
}

// Give a free block the content of a host block, as block `i` of a sequence. Runs on: one lane.
BLINK_RARE_FN void restore_block(State& s, Sequence& q, uint32_t i, uint32_t host_block) {
  const Hash hash = slot_hashes(s, q.slot)[i];
  if (const uint32_t entry = s.hash_table[hash_find(s, hash)]; entry != 0) forget(s, entry - 1);  // it was forged
  const uint32_t block = s.free_blocks[--s.num_free_blocks];
  block_table(s, q.slot)[i] = int32_t(block);
  s.ref_counts[block] = 1;
  for (uint32_t k = 0; k < s.geometry.block_size; k++) block_tokens(s, block)[k] = host_tokens(s, host_block)[k];
  hash_insert(s, hash, block);
  s.block_ids[block] = s.host.ids[host_block];
  s.block_parents[block] = q.chain;
  log_registration(s, block, i == 0 ? kNone : find_registered(s, slot_hashes(s, q.slot)[i - 1], q.chain));
  add_copy(s, {block, host_block, 0});
  s.host.marks[host_block] = HostMark::kHot;
  s.statistics.host_hits += s.geometry.block_size;
}

// Append the blocks that were chosen to a sequence's. Runs on: one lane.
BLINK_RARE_FN void append_restored(State& s, Sequence& q, PrefixHit hit) {
  for (uint32_t n = 0; n < hit.blocks; n++) {
    const uint32_t found = s.host.found[n], i = q.num_blocks;
    if (found & kHostBit)
      restore_block(s, q, i, found & ~kHostBit);
    else
      block_table(s, q.slot)[i] = int32_t(found);
    q.chain = registration_of(s, uint32_t(block_table(s, q.slot)[i]));
    q.num_blocks++;
    q.num_registered++;
    q.num_computed += s.geometry.block_size;
  }
}

// Restore what the host holds of a sequence's next blocks; `taken` blocks are others' in this step, in which `others`
// decode. Returns whether it has to wait for the next step, as there is more.
template <class Env>
BLINK_RARE_FN bool restore_prefix(Env& env, State& s, Sequence& q, uint32_t taken, bool others) {
  const uint32_t available = available_blocks(s), room = copy_room(s) / 2;
  uint32_t limit = least(available - least(taken, available), room);
  if (others) limit = least(limit, kRestoredOfStep);
  env.sync();
  PrefixHit hit;
  if (env.lane() == 0) hit = choose_restored(s, q, limit);
  hit = env.share(hit);
  if (hit.blocks == 0) return false;
  set_word(env, s.host.copies_kept, hit.host_blocks);
  if (s.num_free_blocks < hit.host_blocks) evict<FullPool>(env, s, hit.host_blocks - s.num_free_blocks);
  env.sync();
  const bool waits = others && hit.blocks == limit;
  if (env.lane() == 0) {
    s.host.copies_kept = 0;
    append_restored(s, q, hit);
    if (waits) q.skipped_pass = s.pass;
  }
  env.sync();
  return waits;
}

}  // namespace blink
