// SPDX-License-Identifier: Apache-2.0
// The invariants of the events of the prefix cache, checked from scratch. Host only.
#pragma once

#include "scheduler/event_log.h"

namespace blink {

// First broken invariant of the list of published blocks, or null: it holds registered blocks, each once and after its
// parent, and those that were told of come first.
inline const char* check_events(const State& s) {
  if (!has_events(s)) return nullptr;
  const EventLog& log = s.events;
  if (log.written - log.read > s.geometry.num_kv_events) return "events were written over that the host has not read";
  uint32_t before = 0, count = 0, listed = 0;
  bool is_told = true;
  for (uint32_t at = log.head; at != 0; before = at, at = log.links[at - 1].next) {
    const BlockLink& link = log.links[at - 1];
    if (++count > s.geometry.num_blocks || link.before != before) return "the list of published blocks is broken";
    if (!link.is_listed || !s.block_hashed[at - 1]) return "a block is published that nobody finds";
    if (log.next == at) is_told = false;
    if ((link.told == log.epoch + 1) != is_told) return "a block was told of out of order";
  }
  if (before != log.tail) return "the list of published blocks has another end";
  if (is_told != (log.next == 0)) return "a block that is to be told of is not listed";
  for (uint32_t block = 0; block < s.geometry.num_blocks; block++) listed += log.links[block].is_listed;
  return listed == count ? nullptr : "a published block is in no list";
}

}  // namespace blink
