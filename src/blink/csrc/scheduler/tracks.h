// SPDX-License-Identifier: Apache-2.0
// The two places of a step's batch. A step that is launched whole has the first. One that is launched in segments has
// the second, so that a whole step may run between two of its segments; while it does, the other is suspended.
#pragma once

#include "scheduler/state.h"

namespace blink {

enum class Track : uint32_t { kWhole = 0, kSegmented = 1 };

// What the model reads of one step, and its results.
struct StepArrays {
  BatchHeader* batch;
  StepOutput* output;
  int32_t *input_ids, *positions, *kv_slots, *query_starts, *context_lens, *row_slots;
  int32_t* sampled_tokens;
  float* sampled_logprobs;
  int32_t* top_tokens;
  float* top_logprobs;
  uint32_t* row_sequences;
};

BLINK_FN StepArrays arrays_of(const State& s, Track track) {
  if (track == Track::kWhole)
    return {s.batch,        s.output,       s.input_ids,    s.positions,      s.kv_slots,
            s.query_starts, s.context_lens, s.row_slots,    s.sampled_tokens, s.sampled_logprobs,
            s.top_tokens,   s.top_logprobs, s.row_sequences};
  return {s.segmented_batch,          s.segmented_output,           s.segmented_input_ids,    s.segmented_positions,
          s.segmented_kv_slots,       s.segmented_query_starts,     s.segmented_context_lens, s.segmented_row_slots,
          s.segmented_sampled_tokens, s.segmented_sampled_logprobs, s.segmented_top_tokens,   s.segmented_top_logprobs,
          s.segmented_row_sequences};
}

BLINK_FN Track track_in_flight(const State& s) { return Track(s.in_flight_track); }
BLINK_FN const StepOutput& output_in_flight(const State& s) {
  return track_in_flight(s) == Track::kWhole ? *s.output : *s.segmented_output;
}

// Whether a step is between two of its segments, or one of them runs.
BLINK_FN bool is_segmented(const State& s) { return s.num_segments > 0; }
BLINK_FN bool is_last_segment(const State& s) { return s.segment + 1 == s.num_segments; }

// Whether what runs beside the segmented step overtakes decoding of its own class.
BLINK_FN bool is_overtaken(const State& s) { return is_segmented(s) && s.segmented_best_effort_rows == 0; }

}  // namespace blink
