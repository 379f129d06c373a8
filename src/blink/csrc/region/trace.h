// SPDX-License-Identifier: Apache-2.0
// The trace: an entry for each launch of the scheduler, in a ring.
#pragma once

#include "region/fields.h"

namespace blink {

// One launch: a step, or a segment of one. writer: scheduler. Times in nanoseconds of the scheduler's clock.
struct TraceEntry {
  FIELDS_OF(TraceEntry);
  FIELD(uint64_t, step);
  FIELD(uint64_t, retired_ns);   // the previous step's end was seen (equals composed start)
  FIELD(uint64_t, launched_ns);  // this step was launched
  FIELD(uint64_t, ended_ns);     // its end was seen; 0: it runs
  FIELD(uint32_t, graph);
  FIELD(uint32_t, num_rows);
  FIELD(uint32_t, num_tokens);
  FIELD(uint32_t, num_decode_rows);
  FIELD(uint32_t, num_running);
  FIELD(uint32_t, num_waiting);
  FIELD(uint32_t, num_free_blocks);
  FIELD(uint32_t, num_admitted);
  FIELD(uint32_t, num_preempted);
  FIELD(uint32_t, idle_before);  // 1: no step was in flight when this one was composed
  FIELD(uint32_t, num_best_effort_rows);
  FIELD(uint32_t, step_class);    // StepClass: which class runs
  FIELD(uint32_t, segment);       // of the step's segments, which one this is
  FIELD(uint32_t, num_segments);  // 0: launched whole
  FIELD(uint64_t, predicted_ns);  // what the cost table expected of this launch; 0: there is no table
};

}  // namespace blink
