// SPDX-License-Identifier: Apache-2.0
// Copies between the KV cache and host memory while steps run: one order of some blocks at a time.
//
// An order holds a reference to each of its blocks, and its host blocks are pinned. So nobody else takes one of them,
// whatever becomes of the sequence that waits. It gets its blocks, and others find them, once the order is over. If no
// sequence waits, an order stores what would be evicted next. Evictions copy nothing: what was not stored is lost.
#pragma once

#include "scheduler/host_restore.h"
#include "scheduler/pause.h"

namespace blink {

// Blocks that one order may take: each running sequence is left one to grow by.
BLINK_FN uint32_t most_ordered(const State& s) {
  const uint32_t available = available_blocks(s), most = least(kBlocksOfOrder, s.geometry.host_copies);
  return least(most, available - least(available, s.num_running));
}

// Let a sequence wait for its next blocks if the host has them. Returns whether it does.
template <class Env>
BLINK_RARE_FN bool await_blocks(Env& env, State& s, Sequence& q) {
  env.sync();
  bool waits = false;
  if (env.lane() == 0) {
    const uint32_t first = q.num_blocks, end = restorable_blocks(s, q);
    waits = is_at_border(s, q) && end > first && most_ordered(s) > 0 &&
            walk_host(s, q.slot, first, q.chain, 1, [](uint32_t, bool) {}) > 0;
    if (waits && s.host.wanted == 0) s.host.wanted = uint32_t(&q - s.sequences) + 1;
    if (waits) q.skipped_pass = s.pass;
  }
  return env.share(waits);
}

// Let who copies carry out an order of `count` blocks. Runs on: one lane.
template <class Env>
BLINK_RARE_FN void place_order(Env& env, State& s, uint32_t count) {
  HostOrder& order = *s.host.order;
  s.host.num_ordered = count;
  send_copies(s);
  if (order.begin == order.end) return;  // all blocks are there: it is over
  order.ordered++;
  if (!env.copy(order)) fail(s, ErrorCode::kLaunchFailed, BLINK_HERE, count);
}

// Copy the tokens of the blocks of `count` copies in the ring, from number `first` on.
template <class Env>
BLINK_RARE_FN void copy_tokens(Env& env, State& s, uint32_t first, uint32_t count) {
  const uint32_t size = s.geometry.block_size;
  for (uint32_t at = env.lane(); at < count * size; at += env.lanes()) {
    const HostCopy& copy = s.host.copies[(first + at / size) & (s.geometry.host_copies - 1)];
    int32_t& own = block_tokens(s, copy.block)[at % size];
    int32_t& on_host = host_tokens(s, copy.host_block)[at % size];
    if (copy.to_host)
      on_host = own;
    else
      own = on_host;
  }
  env.sync();
}

// Order the next blocks of the sequence that waits. Returns whether there are any.
template <class Env>
BLINK_RARE_FN bool order_restoration(Env& env, State& s) {
  HostTier& host = s.host;
  env.sync();
  PrefixHit hit;
  if (env.lane() == 0) {
    const Sequence& q = s.sequences[host.wanted - 1];
    if (q.status == SequenceStatus::kRunning && !takes_part(q)) hit = choose_restored(s, q, most_ordered(s));
    if (hit.blocks == 0) host.wanted = 0;
  }
  hit = env.share(hit);
  if (hit.blocks == 0) return false;
  if (s.num_free_blocks < hit.host_blocks) evict<FullPool>(env, s, hit.host_blocks - s.num_free_blocks);
  env.sync();
  const uint32_t first_copy = host.copies_tail;
  env.sync();
  for (uint32_t n = 0; n < hit.blocks && env.lane() == 0; n++) {
    const bool is_on_host = host.found[n] & kHostBit;
    const uint32_t block = is_on_host ? s.free_blocks[--s.num_free_blocks] : host.found[n];
    host.ordered_blocks[n] = block;
    if (is_on_host) s.ref_counts[block] = 1;
    if (is_on_host) add_copy(s, {block, host.found[n] & ~kHostBit, 0});
  }
  env.sync();
  copy_tokens(env, s, first_copy, hit.host_blocks);
  if (env.lane() == 0) {
    const Sequence& q = s.sequences[host.wanted - 1];
    host.restored = host.wanted;
    host.restored_from = q.num_blocks;
    host.restored_arrival = q.arrival;
    s.fast_path_ready = 0;  // it counts on the free blocks
    place_order(env, s, hit.blocks);
  }
  env.sync();
  return true;
}

// How many blocks are looked at before they are evicted: as many as two of the largest steps may take.
BLINK_FN uint32_t most_looked_at(const State& s) {
  const uint32_t ahead =
      2 * ceil_div(s.geometry.max_num_batched_tokens, s.geometry.block_size) + s.geometry.max_num_seqs;
  return least(s.lru_count, ahead - least(ahead, s.num_free_blocks));
}

// Choose up to `limit` blocks that would be evicted next and are not on the host, into HostTier::ordered_blocks.
template <class Env>
BLINK_RARE_FN uint32_t choose_stored(Env& env, State& s, uint32_t limit) {
  const uint32_t end = most_looked_at(s), looked = s.host.looked_until - s.lru_head;
  uint32_t at = looked <= s.lru_count ? looked : 0, chosen = 0;
  while (chosen < limit && at < end) {
    const uint32_t count = least(end - at, env.lanes());
    LruEntry entry{};
    if (env.lane() < count) entry = s.lru[(s.lru_head + at + env.lane()) & (s.geometry.lru_entries - 1)];
    bool is_missing = env.lane() < count && lru_live<FullPool>(s, entry);
    if (is_missing) is_missing = !is_on_host(s, entry.block);
    uint32_t total = 0;
    const uint32_t rank = env.scan(is_missing, total);
    const bool take = is_missing && rank < limit - chosen;
    if (take) s.host.ordered_blocks[chosen + rank] = entry.block;
    at += total < limit - chosen ? count : env.most(take ? env.lane() + 1 : 0);
    chosen += least(total, limit - chosen);
  }
  env.sync();
  if (env.lane() == 0) s.host.looked_until = s.lru_head + at;
  env.sync();
  return chosen;
}

// Hold the blocks that were chosen for which there is a host block. Returns how many. Runs on: one lane.
BLINK_RARE_FN uint32_t hold_stored(State& s, uint32_t chosen) {
  uint32_t held = 0;
  for (uint32_t n = 0; n < chosen; n++) {
    const uint32_t block = s.host.ordered_blocks[n];
    if (renew_on_host(s, block)) continue;
    const uint32_t taken = take_host_block(s);
    if (taken == kNone) continue;
    s.host.marks[taken] = HostMark::kPinned;
    describe_copy(s, block, taken);
    s.ref_counts[block] = 1;
    s.num_evictable--;
    s.host.ordered_blocks[held++] = block;
  }
  return held;
}

// Order that blocks be stored which would be evicted next.
template <class Env>
BLINK_RARE_FN void order_store(Env& env, State& s) {
  const uint32_t chosen = choose_stored(env, s, most_ordered(s));
  if (chosen == 0) return;
  const uint32_t first_copy = s.host.copies_tail;
  env.sync();
  uint32_t held = 0;
  if (env.lane() == 0) held = hold_stored(s, chosen);
  held = env.share(held);
  copy_tokens(env, s, first_copy, held);
  if (env.lane() == 0 && held > 0) place_order(env, s, held);
  env.sync();
}

// Give back an order's reference to a block. One that nobody uses is evicted next, or free. Runs on: one lane.
BLINK_RARE_FN void drop_ordered(State& s, uint32_t block) {
  if (--s.ref_counts[block] > 0) return;
  if (s.block_hashed[block]) {
    s.block_stamps[block] = s.next_stamp;
    s.lru[--s.lru_head & (s.geometry.lru_entries - 1)] = LruEntry{block, s.next_stamp++};
    s.lru_count++;
    s.num_evictable++;
  } else {
    s.free_blocks[s.num_free_blocks++] = block;
    s.fast_path_ready = 0;
  }
}

// Note what became of the host blocks of the order that is over. Runs on: one lane.
BLINK_RARE_FN void unpin(State& s) {
  HostTier& host = s.host;
  for (uint32_t at = host.order->begin; at != host.order->end; at++) {
    const HostCopy copy = host.copies[at & (s.geometry.host_copies - 1)];
    host.marks[copy.host_block] = host.is_void ? HostMark::kEmpty : HostMark::kHot;
    if (!host.is_void && copy.to_host) list_host_block(s, copy.host_block);
  }
}

// End the order that is over: the sequence that waits gets its blocks, if it still stands where it stood.
template <class Env>
BLINK_RARE_FN void end_order(Env& env, State& s) {
  HostTier& host = s.host;
  const uint32_t count = host.num_ordered;
  if (s.lru_count + count > s.geometry.lru_entries) compact_lru<FullPool>(env, s);
  env.sync();
  if (env.lane() == 0) {
    unpin(s);
    Sequence& q = s.sequences[host.restored > 0 ? host.restored - 1 : 0];
    const bool is_there = is_being_restored(s, q) && q.status == SequenceStatus::kRunning && !host.is_void &&
                          is_at_border(s, q) && q.num_blocks == host.restored_from;
    if (is_there) s.statistics.host_hits += (host.order->end - host.order->begin) * s.geometry.block_size;
    for (uint32_t n = 0; is_there && n < count; n++) append_found(s, q, host.ordered_blocks[n], host.found[n]);
    for (uint32_t n = count; !is_there && n > 0; n--) drop_ordered(s, host.ordered_blocks[n - 1]);
    if (is_there && host.wanted == 0) host.wanted = host.restored;  // it goes on, as no other waits
    host.num_ordered = host.restored = host.is_void = 0;
    s.stats_dirty = 1;
  }
  env.sync();
}

// End the order in flight if it is over.
template <class Env>
BLINK_FN void end_order_if_over(Env& env, State& s) {
  if (!copies_beside(s)) return;
  env.sync();
  if (env.share(env.lane() == 0 && is_order_over(s))) end_order(env, s);
}

// Follow the order in flight, and place the next one: for the sequence that waits, or to store blocks. While a pause
// begins or lasts, none is placed.
template <class Env>
BLINK_RARE_FN void page_blocks(Env& env, State& s) {
  if (!copies_beside(s)) return;
  end_order_if_over(env, s);
  const bool may_order =
      env.share(env.lane() == 0 && s.host.num_ordered == 0 && !is_pausing(s) && !s.failed && env.has_copy_room());
  if (!may_order) return;
  if (s.host.wanted > 0 && order_restoration(env, s)) return;
  order_store(env, s);
}

// Restore a sequence's next blocks before it gets a chunk of the step that is composed. Returns whether it has to wait
// for a later one. taken, others: as restore_prefix() has them.
template <class Env>
BLINK_RARE_FN bool restore_first(Env& env, State& s, Sequence& q, uint32_t taken, bool others) {
  return copies_beside(s) ? await_blocks(env, s, q) : restore_prefix(env, s, q, taken, others);
}

}  // namespace blink
