// SPDX-License-Identifier: Apache-2.0
// A step is launched whole, or in segments of layers. Each kind has its own StepBuffers, so that a whole step may run
// between two segments. The layer-segmented step is paused meanwhile.
#pragma once

#include "scheduler/state.h"

namespace blink {

enum class StepKind : uint32_t { kWhole = 0, kSegmented = 1 };

BLINK_FN const StepBuffers& buffers_of(const State& s, StepKind kind) {
  return kind == StepKind::kWhole ? s.whole : s.segmented;
}

BLINK_FN StepKind kind_in_flight(const State& s) { return StepKind(s.in_flight_kind); }
BLINK_FN const StepOutput& output_in_flight(const State& s) { return *buffers_of(s, kind_in_flight(s)).output; }

// Whether a step is between two of its segments, or one of them runs.
BLINK_FN bool is_segmented(const State& s) { return s.num_segments > 0; }
BLINK_FN bool is_last_segment(const State& s) { return s.segment + 1 == s.num_segments; }

// Whether a step that runs meanwhile preempts decoding of its own class.
BLINK_FN bool is_decode_preempted(const State& s) { return is_segmented(s) && s.segmented_best_effort_rows == 0; }

}  // namespace blink
