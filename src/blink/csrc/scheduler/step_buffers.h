// SPDX-License-Identifier: Apache-2.0
// One step: the batch that the model reads, the rows that it was made from, and the model's results.
#pragma once

#include "scheduler/row.h"

namespace blink {

struct BatchHeader {
  FIELDS_OF(BatchHeader);
  FIELD(uint32_t, num_rows);
  FIELD(uint32_t, num_tokens);
  FIELD(uint32_t, num_decode_rows);  // which are the first
  FIELD(uint32_t, graph);
  FIELD(uint64_t, step);     // number of the launch
  FIELD(uint32_t, segment);  // of the step, that is launched
  uint32_t reserved;
};

struct StepOutput {
  FIELDS_OF(StepOutput);
  FIELD(uint64_t, done_step);  // the step that finished, stored with release
  FIELD(uint32_t, failed);     // 0: no; 1: the model did; kFirstLostRank + r: rank r is lost
};

// How a launch stands.
enum class Outcome : uint32_t { kRuns, kDone, kFailed };
BLINK_FN Outcome read_outcome(const StepOutput& output, uint64_t step) {
  if (load_acquire(output.done_step) != step) return Outcome::kRuns;
  return output.failed ? Outcome::kFailed : Outcome::kDone;
}

// CQEs of a prompt's vector, and its floats in the buffers.
BLINK_FN uint32_t vector_completions(const Geometry& g) { return ceil_div(g.vector_width, kValuesOfCqe); }
BLINK_FN uint64_t vector_floats(const Geometry& g) { return uint64_t(vector_completions(g)) * kValuesOfCqe; }

// The state has two of them (step_kind.h), at addresses that never change.
struct StepBuffers {
  FIELDS_OF(StepBuffers);
  STATE_ARRAY(BatchHeader, header, 1);
  STATE_ARRAY(StepOutput, output, 1);
  STATE_ARRAY(Row, rows, g.max_rows);
  STATE_ARRAY(int32_t, input_ids, g.max_num_batched_tokens);
  STATE_ARRAY(int32_t, positions, g.max_num_batched_tokens);
  STATE_ARRAY(int32_t, kv_slots, g.max_num_batched_tokens);
  STATE_ARRAY(int32_t, window_kv_slots, g.num_window_blocks == 0 ? 0 : g.max_num_batched_tokens);  // in window blocks
  STATE_ARRAY(int32_t, query_starts, g.max_rows + 1);
  STATE_ARRAY(int32_t, context_lens, g.max_rows);
  STATE_ARRAY(int32_t, row_slots, g.max_rows);
  STATE_ARRAY(int32_t, state_sources, g.max_rows);  // index + 1 of the snapshot that a row begins with; 0: none
  STATE_ARRAY(int32_t, state_targets, g.max_rows);  // of the one that is made of its states at the end
  STATE_ARRAY(int32_t, state_lags, g.max_rows);     // tokens before a row's first that its states have to take in yet
  STATE_ARRAY(int32_t, sampled_tokens, g.max_rows);
  STATE_ARRAY(float, sampled_logprobs, g.max_rows);
  STATE_ARRAY(int32_t, top_tokens, g.max_rows* kMaxLogprobs);
  STATE_ARRAY(float, top_logprobs, g.max_rows* kMaxLogprobs);
  STATE_ARRAY(float, prompt_logprobs, g.max_num_batched_tokens);  // of the token behind each of the batch
  STATE_ARRAY(int32_t, prompt_top_tokens, g.max_num_batched_tokens* kMaxLogprobs);
  STATE_ARRAY(float, prompt_top_logprobs, g.max_num_batched_tokens* kMaxLogprobs);
  STATE_ARRAY(float, vectors, g.max_num_seqs* vector_floats(g));  // of each row that ends its prompt
};

}  // namespace blink
