// SPDX-License-Identifier: Apache-2.0
// What the scheduler keeps for its events of the prefix cache (event_log.h).
#pragma once

#include "region/kv_events.h"

namespace blink {

// A block of the list of those that are published. Neighbours are named by block + 1; 0: there is none.
struct BlockLink {
  FIELDS_OF(BlockLink);
  FIELD(uint32_t, is_listed);
  FIELD(uint32_t, told);  // EventLog::epoch + 1 in which an event told of it; 0: none has
  FIELD(uint32_t, before);
  FIELD(uint32_t, next);
  FIELD(uint64_t, parent);  // low half of its parent's hash
};

struct EventLog {
  FIELDS_OF(EventLog);
  STATE_ARRAY(BlockLink, links, g.num_kv_events == 0 ? 0 : g.num_blocks);
  // in the region
  FIELD(KvEventWords*, words);
  FIELD(KvEvent*, ring);
  FIELD(int32_t*, tokens);

  FIELD(uint64_t, written);    // events in the ring
  FIELD(uint64_t, published);  // KvEventWords::written
  FIELD(uint64_t, read);       // KvEventWords::read as it was last seen
  FIELD(uint64_t, root_low);   // Header::kv_event_root
  FIELD(uint64_t, root_high);
  FIELD(uint32_t, head);  // of the list: block + 1
  FIELD(uint32_t, tail);
  FIELD(uint32_t, next);        // the first that is still to be told of
  FIELD(uint32_t, epoch);       // how often the events began anew
  FIELD(KvEventKind, restart);  // what has to be written first
  uint32_t reserved;
};

}  // namespace blink
