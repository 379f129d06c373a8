// SPDX-License-Identifier: Apache-2.0
// Tells routers what the prefix cache holds: events in a ring of the region (region/kv_events.h), which the engine's
// host publishes. The scheduler never waits for the host.
//
// Published blocks form a list in the order of their registration, so a block follows its parent. All from `next`
// on are still to be told. A ring that is full delays them; one without space for a removal restarts the events:
// they begin anew with the first block. Only chains of the bare model without a salt are published.
#pragma once

#include "scheduler/block_hash.h"

namespace blink {

constexpr uint32_t kEventsOfPass = 64;  // blocks that one pass tells of

BLINK_FN bool has_events(const State& s) { return s.geometry.num_kv_events > 0; }

// How many events the ring has room for, where at least `wanted` are needed. Runs on: one lane.
// Orders: `read` (acquire) before the entries that it gives back are written.
BLINK_FN uint64_t event_room(State& s, uint64_t wanted) {
  EventLog& log = s.events;
  const uint64_t entries = s.geometry.num_kv_events;
  if (entries - (log.written - log.read) < wanted) log.read = load_acquire(log.words->read);
  return entries - (log.written - log.read);
}

// Write an event, its tokens aside; the caller has asked for room. Runs on: one lane.
BLINK_FN void write_event(State& s, KvEvent event) {
  s.events.ring[s.events.written++ & (s.geometry.num_kv_events - 1)] = event;
}

// Let the events begin anew, with one of `kind`. Runs on: one lane.
BLINK_FN void restart_events(State& s, KvEventKind kind) {
  EventLog& log = s.events;
  log.epoch++;
  log.next = log.head;
  log.restart = KvEventKind(most(uint32_t(log.restart), uint32_t(kind)));
  s.statistics.kv_event_restarts += kind == KvEventKind::kRestarted;
}

// Put a block that was registered at the list's end. Runs on: one lane.
BLINK_RARE_FN void list_block(State& s, uint32_t block, uint32_t parent) {
  EventLog& log = s.events;
  log.links[block] = BlockLink{1, 0, log.tail, 0, parent == kNone ? 0 : s.block_hashes[parent].low};
  (log.tail > 0 ? log.links[log.tail - 1].next : log.head) = block + 1;
  log.tail = block + 1;
  if (log.next == 0) log.next = block + 1;
}

// Take a block out of the list that is no longer found; tell of it, if it was told of. Runs on: one lane.
BLINK_RARE_FN void unlist_block(State& s, uint32_t block) {
  EventLog& log = s.events;
  const BlockLink link = log.links[block];
  if (!link.is_listed) return;
  log.links[block] = BlockLink{};
  (link.before > 0 ? log.links[link.before - 1].next : log.head) = link.next;
  (link.next > 0 ? log.links[link.next - 1].before : log.tail) = link.before;
  if (log.next == block + 1) log.next = link.next;
  if (link.told != log.epoch + 1) return;
  if (event_room(s, 1) == 0) return restart_events(s, KvEventKind::kRestarted);
  write_event(s, {KvEventKind::kRemoved, 0, s.block_hashes[block].low, 0});
}

// Whether a registered block that follows `parent` is of a chain that is published. Runs on: one lane.
BLINK_RARE_FN bool is_published(const State& s, uint32_t block, uint32_t parent) {
  if (s.block_parents[block].block != kNone) return parent != kNone && s.events.links[parent].is_listed;
  const uint32_t size = s.geometry.block_size;
  const int32_t* tokens = s.block_tokens + uint64_t(block) * size;
  const Hash own = hash_block({s.hash_key_low, s.hash_key_high}, {s.events.root_low, s.events.root_high}, tokens, size);
  return s.block_parents[block].count == 0 && own == s.block_hashes[block];
}

// Note a block that was registered, and its parent in the cache; kNone: it has none. Runs on: one lane.
BLINK_FN void log_registration(State& s, uint32_t block, uint32_t parent) {
  if (has_events(s) && is_published(s, block, parent)) list_block(s, block, parent);
}

// Note that the cache is empty, after all links are cleared. Runs on: one lane.
BLINK_FN void log_reset(State& s) {
  s.events.head = s.events.tail = 0;
  restart_events(s, KvEventKind::kCleared);
}

// Write events of the next blocks of the list, as far as a pass and the ring go; a quarter of the ring is left to
// removals. Returns how many. Runs on: one lane.
BLINK_RARE_FN uint32_t write_stored(State& s) {
  EventLog& log = s.events;
  if (log.restart != KvEventKind::kNone) {
    if (event_room(s, 1) == 0) return 0;
    write_event(s, {log.restart, 0, 0, 0});
    log.restart = KvEventKind::kNone;
  }
  const uint64_t spare = s.geometry.num_kv_events / 4;
  uint32_t count = 0;
  for (; count < kEventsOfPass && log.next != 0 && event_room(s, spare + 1) > spare; count++) {
    const uint32_t block = log.next - 1;
    const Registration parent = s.block_parents[block];
    const bool has_parent = parent.block != kNone;
    write_event(s, {KvEventKind::kStored, has_parent, s.block_hashes[block].low, log.links[block].parent});
    log.links[block].told = log.epoch + 1;
    log.next = log.links[block].next;
    s.victims[count] = block;
  }
  return count;
}

// Hand the host what is to be told. Nobody waits for this: it is done after a launch, or when idle.
// Orders: all events before `written` (release).
template <class Env>
BLINK_RARE_FN void publish_events(Env& env, State& s) {
  EventLog& log = s.events;
  env.sync();
  const bool is_quiet = log.next == 0 && log.restart == KvEventKind::kNone && log.written == log.published;
  if (!has_events(s) || is_quiet) return;
  env.sync();
  uint32_t count = 0;
  if (env.lane() == 0) count = write_stored(s);
  count = env.share(count);
  const uint32_t size = s.geometry.block_size;
  const uint64_t first = log.written - count;
  for (uint32_t at = env.lane(); at < count * size; at += env.lanes()) {
    const uint64_t entry = (first + at / size) & (s.geometry.num_kv_events - 1);
    log.tokens[entry * size + at % size] = s.block_tokens[uint64_t(s.victims[at / size]) * size + at % size];
  }
  env.sync();
  if (env.lane() == 0) {
    log.published = log.written;
    store_release(log.words->written, log.written);
  }
  env.sync();
}

}  // namespace blink
