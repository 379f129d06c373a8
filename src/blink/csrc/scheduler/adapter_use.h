// SPDX-License-Identifier: Apache-2.0
// What the scheduler keeps of adapters (LoRA): see adapters.h.
#pragma once

#include "scheduler/step_buffers.h"

namespace blink {

// An adapter of the host's memory, as sequences use it (adapters.h).
struct AdapterUse {
  FIELDS_OF(AdapterUse);
  FIELD(uint64_t, kept_until_ns);  // until when a copy stays for those that wait for it; 0: it was used
  FIELD(uint32_t, generation);     // that sequences may use; 0: none
  FIELD(uint32_t, content);        // of equal contents the same
  FIELD(uint32_t, num_users);      // sequences
  FIELD(uint32_t, num_in_slots);   // of these, those with an adapter_slot
  FIELD(uint32_t, slot);           // index + 1 of the model's copy, there or on its way; 0: there is none
};

// A copy that the scheduler orders while steps run: of an adapter to one of the model's slots.
struct CopyOrder {
  FIELDS_OF(CopyOrder);
  FIELD(uint32_t, source);   // index of the adapter
  FIELD(uint32_t, target);   // slot
  FIELD(uint32_t, ordered);  // copies so far
  FIELD(uint32_t, done);     // of these; writer: who copies, with release
};

}  // namespace blink
