// SPDX-License-Identifier: Apache-2.0
// The words of an adapter (LoRA) that engine and scheduler share. scheduler/adapters.h has the protocol.
#pragma once

#include "region/fields.h"

namespace blink {

// An adapter (LoRA) in the host's memory, by its index.
struct AdapterWords {
  FIELDS_OF(AdapterWords);
  // writer: engine
  alignas(64) FIELD(uint32_t, generation);  // no two adapters have the same, whatever their index; 0: there is none
  FIELD(uint32_t, content);                 // equal contents have the same, and no others; stored before `generation`
  // writer: scheduler
  alignas(64) FIELD(uint32_t, seen);  // the generation that sequences may use
  FIELD(uint32_t, num_users);         // sequences, whether they run or wait
  FIELD(uint32_t, num_in_slots);      // of these, those that the model's memory has it for
  FIELD(uint32_t, last_use);          // grows with each sequence that comes for any adapter
};

}  // namespace blink
