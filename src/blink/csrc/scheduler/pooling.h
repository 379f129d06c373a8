// SPDX-License-Identifier: Apache-2.0
// Pooling: an engine that makes a vector of each prompt, an embedding or a score, and generates nothing. The step that
// computes a prompt's last tokens leaves the vector in its buffers. It goes to the frontend as CQEs, then the sequence
// ends. docs/embeddings.md has the reasons.
#pragma once

#include "scheduler/queue_pair.h"

namespace blink {

// Whether the model made a vector of a row; it says kInvalidLogits where a number is not finite.
BLINK_FN bool is_vector(const StepBuffers& a, const Row& row) {
  return a.sampled_tokens[row.first_sample] != kInvalidLogits;
}

// Store a part of a vector at a position that the caller owns, as post_at() does.
BLINK_FN void post_values(const State& s, uint32_t qp, uint32_t position, uint64_t sequence, const float* values,
                          uint32_t index) {
  auto& slot = reinterpret_cast<VectorCqe&>(cq_entry(s, qp, position));
  slot.sequence = sequence;
  for (uint32_t i = 0; i < kValuesOfCqe; i++) slot.values[i] = values[i];
  slot.index = index;
  const uint32_t phase = cq_phase(position, s.geometry.cq_entries);
  store_release(slot.tag, tag_word({uint8_t(phase), CqeKind::kVector, FinishReason::kNone, 0}));
}

// Post the vectors of the rows that end their prompts. Before retire() ends their sequences. Runs on: all lanes.
template <class Env>
BLINK_RARE_FN void deliver_vectors(Env& env, State& s, const StepBuffers& a) {
  const uint32_t num_rows = a.header->num_rows, each = vector_completions(s.geometry);
  for (uint32_t n = 0; n < num_rows; n++) {
    const Row row = a.rows[n];
    const Sequence& q = s.sequences[row.sequence];
    QueuePairState& pair = s.qps[q.queue_pair];
    if (row.num_samples == 0 || q.cancelled || pair.closing || !is_vector(a, row)) continue;
    const float* values = a.vectors + row.first_sample * vector_floats(s.geometry);
    const uint32_t start = pair.cq_tail;
    for (uint32_t i = env.lane(); i < each; i += env.lanes())
      post_values(s, q.queue_pair, start + i, q.sqe.sequence, values + i * kValuesOfCqe, i * kValuesOfCqe);
    env.sync();
    if (env.lane() == 0) pair.cq_tail += each;
    env.sync();
  }
}

}  // namespace blink
