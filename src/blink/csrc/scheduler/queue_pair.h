// SPDX-License-Identifier: Apache-2.0
// The scheduler's end of the queue pairs: words of the region, validation of SQEs, posting of CQEs.
#pragma once

#include "scheduler/state.h"

namespace blink {

BLINK_FN uint8_t* queue_pair_base(const State& s, uint32_t qp) { return s.queue_pairs + qp * s.queue_pair.bytes; }
BLINK_FN FrontendWords& frontend_words(const State& s, uint32_t qp) {
  return *reinterpret_cast<FrontendWords*>(queue_pair_base(s, qp));
}
BLINK_FN SchedulerWords& scheduler_words(const State& s, uint32_t qp) {
  return *reinterpret_cast<SchedulerWords*>(queue_pair_base(s, qp) + s.queue_pair.scheduler_words);
}
BLINK_FN const Sqe& sq_entry(const State& s, uint32_t qp, uint32_t position) {
  return reinterpret_cast<const Sqe*>(queue_pair_base(s, qp) + s.queue_pair.sq)[position & (s.geometry.sq_entries - 1)];
}
BLINK_FN Cqe& cq_entry(const State& s, uint32_t qp, uint32_t position) {
  return reinterpret_cast<Cqe*>(queue_pair_base(s, qp) + s.queue_pair.cq)[position & (s.geometry.cq_entries - 1)];
}
BLINK_FN const uint8_t* arena(const State& s, uint32_t qp) { return queue_pair_base(s, qp) + s.queue_pair.arena; }

// Free CQ entries beyond those that the steps in flight and paused may need. A nonsense head counts as a full queue.
BLINK_FN uint32_t cq_room(const State& s, const QueuePairState& q) {
  const uint32_t used = q.cq_tail - q.cq_head;
  const uint32_t taken = used > s.geometry.cq_entries ? s.geometry.cq_entries : used + q.cq_need + q.cq_held;
  return taken >= s.geometry.cq_entries ? 0 : s.geometry.cq_entries - taken;
}

// Completions that one sample posts at most.
BLINK_FN uint32_t most_completions(const Geometry& g) {
  return 1 + (is_pooling(g) ? vector_completions(g) : kMaxLogprobs);
}

// Whether something waits until the frontend reads the completions that it has.
BLINK_FN bool is_blocked(const State& s, const QueuePairState& q) {
  if (q.cq_tail == q.cq_head || (q.num_live == 0 && q.sq_head == q.sq_tail)) return false;
  return !q.open || cq_room(s, q) <= most_completions(s.geometry);
}

// Completions that the last row of this sequence's prompt posts, and each one behind it: a vector and the end, or a
// token.
BLINK_FN uint32_t completions_per_sample(const State& s, const Sequence& q) {
  if (is_pooling(s.geometry)) return most_completions(s.geometry);
  return 1 + (q.sqe.sampling.num_logprobs > 0 ? uint32_t(q.sqe.sampling.num_logprobs) : 0);
}

// Store one completion at a position that the caller owns.
// Orders: the payload before the tag (release); the frontend acquires the tag.
BLINK_RARE_FN void post_at(const State& s, uint32_t qp, uint32_t position, const Cqe& entry, CqeKind kind,
                           FinishReason finish, uint32_t rank) {
  Cqe& slot = cq_entry(s, qp, position);
  slot.sequence = entry.sequence;
  slot.time_ns = entry.time_ns;
  slot.token = entry.token;
  slot.logprob = entry.logprob;
  slot.index = entry.index;
  const uint32_t phase = cq_phase(position, s.geometry.cq_entries);
  store_release(slot.tag, tag_word({uint8_t(phase), kind, finish, uint8_t(rank)}));
}

// Post one completion from a single lane; the caller has checked cq_room().
BLINK_FN void post(State& s, uint32_t qp, uint64_t sequence, CqeKind kind, FinishReason finish, int32_t token,
                   uint64_t now) {
  post_at(s, qp, s.qps[qp].cq_tail++, Cqe{sequence, now, token, 0.0f, 0, 0}, kind, finish, 0);
}

BLINK_FN bool in_arena(const Geometry& g, uint32_t offset, uint64_t bytes) {
  return offset % 4 == 0 && uint64_t(offset) + bytes <= g.arena_bytes;
}

// Whether the arena may hold an automaton there, and it could be used.
BLINK_FN bool valid_automaton_span(const Geometry& g, const Sqe& e) {
  return e.automaton_bytes <= kMaxAutomatonBytes && e.automaton_bytes % kAutomatonUnit == 0 &&
         e.automaton_offset % kAutomatonUnit == 0 && in_arena(g, e.automaton_offset, e.automaton_bytes) &&
         e.automaton_bytes >= sizeof(AutomatonHeader) + kBytes && g.vocab_bytes > 0 && g.num_automata > 0;
}

// Whether nothing is asked for that only generated tokens have.
BLINK_FN bool valid_for_pooling(const Sqe& e) {
  return e.max_tokens == 1 && e.sampling.num_logprobs <= 0 && e.sampling.num_prompt_logprobs == 0 &&
         e.automaton_bytes == 0;
}

// Check every word of a submission that can be checked without its arena.
BLINK_RARE_FN RejectCode validate(const Geometry& g, const Sqe& e) {
  if (e.num_prompt_tokens == 0 || e.num_prompt_tokens > longest_prompt(g)) return RejectCode::kPromptLength;
  if (!in_arena(g, e.prompt_offset, uint64_t(e.num_prompt_tokens) * 4)) return RejectCode::kPromptRange;
  if (e.num_stop_tokens > kMaxStopTokens) return RejectCode::kStopTokens;
  if (e.num_stop_tokens > kInlineStopTokens &&
      !in_arena(g, e.more_stop_offset, uint64_t(e.num_stop_tokens - kInlineStopTokens) * 4))
    return RejectCode::kStopTokens;
  if (e.num_biases > kMaxLogitBiases || e.sampling.named_logprobs > e.num_biases) return RejectCode::kLogitBias;
  if (e.num_biases > 0 && !in_arena(g, e.bias_offset, uint64_t(e.num_biases) * 8)) return RejectCode::kLogitBias;
  if (e.num_hashes > e.num_prompt_tokens / g.block_size) return RejectCode::kHashes;
  if (e.num_hashes > 0 && !in_arena(g, e.hashes_offset, uint64_t(e.num_hashes) * kBlockHashBytes))
    return RejectCode::kHashes;
  if (!valid_sampling(e.sampling)) return RejectCode::kSamplingValue;
  if (e.max_tokens == 0 || e.sampling.min_tokens > e.max_tokens) return RejectCode::kMaxTokens;
  if (e.service_class > uint32_t(ServiceClass::kBestEffort)) return RejectCode::kServiceClass;
  if (e.tpot_target_us > kMaxTpotTargetUs && e.tpot_target_us != kNoTpotTarget) return RejectCode::kTpotTarget;
  if (e.num_prediction_tokens > g.max_model_len ||
      (e.num_prediction_tokens > 0 && !in_arena(g, e.prediction_offset, uint64_t(e.num_prediction_tokens) * 4)))
    return RejectCode::kPrediction;
  if (e.automaton_bytes > 0 && !valid_automaton_span(g, e)) return RejectCode::kAutomatonRange;
  if (is_pooling(g) && !valid_for_pooling(e)) return RejectCode::kPooling;
  return RejectCode::kNone;
}

}  // namespace blink
