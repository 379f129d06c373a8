// SPDX-License-Identifier: Apache-2.0
// Events of the prefix cache, which the engine's host publishes for routers (scheduler/event_log.h).
//
//   KvEventWords | ring of KvEvent | ring of tokens: those of a block for each event
#pragma once

#include "region/fields.h"

namespace blink {

// kRestarted: what came before is void, as the ring was full; all blocks follow anew.
enum class KvEventKind : uint32_t { kNone = 0, kStored = 1, kRemoved = 2, kCleared = 3, kRestarted = 4 };

// writer: scheduler, before KvEventWords::written. A hash is the low half of a block's.
struct KvEvent {
  FIELDS_OF(KvEvent);
  FIELD(KvEventKind, kind);
  FIELD(uint32_t, has_parent);  // of a kStored: whether it is not a prompt's first block
  FIELD(uint64_t, hash);
  FIELD(uint64_t, parent);  // the hash of the block before it
};

// Events from `read` up to `written` belong to the host, all others to the scheduler.
struct KvEventWords {
  FIELDS_OF(KvEventWords);
  // writer: scheduler
  alignas(64) FIELD(uint64_t, written);
  // writer: engine
  alignas(64) FIELD(uint64_t, read);
};

// Byte offsets of the rings behind KvEventWords, and the bytes of all.
struct KvEventLayout {
  FIELDS_OF(KvEventLayout);
  FIELD(uint64_t, events);
  FIELD(uint64_t, tokens);
  FIELD(uint64_t, bytes);
};

BLINK_FN KvEventLayout kv_event_layout(uint32_t num_events, uint32_t block_size) {
  KvEventLayout l{};
  if (num_events == 0) return l;
  l.events = sizeof(KvEventWords);
  l.tokens = l.events + uint64_t(num_events) * sizeof(KvEvent);
  l.bytes = l.tokens + uint64_t(num_events) * block_size * sizeof(int32_t);
  return l;
}

}  // namespace blink
