// SPDX-License-Identifier: Apache-2.0
// What the steps of each graph take: measured at boot, and corrected by each launch (cost.h).
#pragma once

#include "region/codes.h"
#include "region/fields.h"

namespace blink {

// What a step of one graph takes: of its whole size, and beyond it for each token of the KV cache that it reads.
// writer: engine at boot, then the scheduler.
struct GraphCost {
  FIELDS_OF(GraphCost);
  FIELD(uint64_t, base_ns);
  FIELD(uint32_t, kv_ps);         // picoseconds
  FIELD(uint32_t, num_segments);  // in which it may be launched; 1: only whole; 0: nothing was measured
};

// A graph's cost as the engine measured it, from when it is corrected first.
struct MeasuredCost {
  FIELDS_OF(MeasuredCost);
  FIELD(uint64_t, base_ns);
  FIELD(uint64_t, learned_step);  // in which it was corrected last
  FIELD(uint32_t, kv_ps);
  FIELD(uint32_t, is_known);
};

// The newest launch, and its time once it is over and not accounted for.
struct Account {
  FIELDS_OF(Account);
  FIELD(uint64_t, spent_ns);
  FIELD(uint64_t, predicted_ns);
  FIELD(uint64_t, kv_tokens);  // that it reads
  FIELD(uint32_t, graph);
  FIELD(uint32_t, num_best_effort_rows);
  FIELD(StepClass, step_class);
  FIELD(uint32_t, segmented);
};

}  // namespace blink
