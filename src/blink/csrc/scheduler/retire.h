// SPDX-License-Identifier: Apache-2.0
// Ends a step: delivers each sampled token once, in order, and ends the sequences that are complete.
#pragma once

#include "scheduler/drafts.h"
#include "scheduler/ending.h"
#include "scheduler/pooling.h"
#include "scheduler/prompt_logprobs.h"

namespace blink {

BLINK_FN bool is_stop_token(const State& s, const Sequence& q, int32_t token) {
  const int32_t* stops = s.stop_tokens + uint64_t(q.slot) * kMaxStopTokens;
  for (uint32_t i = 0; i < q.sqe.num_stop_tokens; i++)
    if (stops[i] == token) return true;
  return false;
}

BLINK_FN FinishReason finish_of(const State& s, const Sequence& q, int32_t token) {
  if (q.num_generated > q.sqe.sampling.min_tokens && is_stop_token(s, q, token)) return FinishReason::kStop;
  if (q.num_generated >= q.sqe.max_tokens || q.num_tokens >= s.geometry.max_model_len) return FinishReason::kLength;
  return FinishReason::kNone;
}

// How often a sequence was preempted since this was asked last. Runs on: one lane.
BLINK_FN uint32_t take_preemptions(Sequence& q) {
  const uint32_t count = q.preemptions;
  q.preemptions = 0;
  return count;
}

// Post a sampled token, the sequence's last, at a position that the caller owns. predicted: CqeTag::rank's low bits.
BLINK_FN void post_token(State& s, uint32_t at, Sequence& q, int32_t token, float logprob, uint32_t predicted,
                         uint64_t now) {
  const Cqe entry{q.sqe.sequence, now, token, logprob, q.num_generated - 1, 0};
  const uint32_t rank = predicted | take_preemptions(q) << kPredictedBits;
  post_at(s, q.queue_pair, at, entry, CqeKind::kToken, q.finish, rank);
}

// Post a sample's completions: the top logprobs, then the token. Runs on: one lane.
template <class Env>
BLINK_FN void deliver(Env& env, State& s, const StepBuffers& a, uint32_t sample, Sequence& q, uint32_t predicted,
                      uint64_t now) {
  const uint32_t extra = completions_per_sample(s, q) - 1;
  uint32_t at = env.fetch_add(s.qps[q.queue_pair].cq_tail, extra + 1);
  for (uint32_t rank = 0; rank < extra; rank++) {
    const uint32_t top = sample * kMaxLogprobs + rank;
    const Cqe entry{q.sqe.sequence, now, a.top_tokens[top], a.top_logprobs[top], q.num_generated - 1, 0};
    post_at(s, q.queue_pair, at++, entry, CqeKind::kTopLogprob, FinishReason::kNone, rank);
  }
  post_token(s, at, q, a.sampled_tokens[sample], a.sampled_logprobs[sample], predicted, now);
}

// End a sequence without a token: its row gave nothing to sample from, or its text is complete. Those of the same step
// go on. Runs on: one lane.
template <class Env>
BLINK_FN void end_without_token(Env& env, State& s, Sequence& q, FinishReason reason, uint64_t now) {
  q.finish = reason;
  const Cqe entry{q.sqe.sequence, now, 0, 0.0f, 0, 0};
  const uint32_t at = env.fetch_add(s.qps[q.queue_pair].cq_tail, 1);
  post_at(s, q.queue_pair, at, entry, CqeKind::kFinished, q.finish, take_preemptions(q));
}

// Take over one sample of a row: a token, or the text's end. Runs on: one lane.
template <class Env>
BLINK_FN void take_sample(Env& env, State& s, const StepBuffers& a, uint32_t sample, Sequence& q, uint32_t predicted,
                          uint64_t now) {
  const int32_t token = a.sampled_tokens[sample];
  if (token == kInvalidLogits) return end_without_token(env, s, q, FinishReason::kError, now);
  if (token == kGrammarDone && q.automaton != kNone) return end_without_token(env, s, q, FinishReason::kStop, now);
  if (token < 0 || uint32_t(token) >= s.geometry.vocab_size)
    return fail(s, ErrorCode::kSampledTokenRange, BLINK_HERE, sample);
  if (speculates(s)) follow_source(s, q, token);
  tokens_of(s, q.slot)[q.num_tokens] = token;
  q.num_tokens++;
  q.num_generated++;
  q.finish = finish_of(s, q, token);
  deliver(env, s, a, sample, q, predicted, now);
}

// Take over the samples of a row, as far as each is the draft that the next one was computed behind. Runs on: one lane.
template <class Env>
BLINK_FN void take_samples(Env& env, State& s, const StepBuffers& a, const Row& row, Sequence& q, uint64_t now) {
  bool is_accepted = row.num_samples > 0;
  for (uint32_t i = 0; is_accepted && q.finish == FinishReason::kNone; i++) {
    const uint32_t sample = row.first_sample + i, drafts = row.num_samples - 1 - i;
    is_accepted = drafts > 0 && tokens_of(s, q.slot)[q.num_tokens] == a.sampled_tokens[sample];
    const uint32_t given_up = is_accepted ? 0 : drafts;
    const bool is_predicted = drafts > 0 && q.drafting.is_prediction;
    take_sample(env, s, a, sample, q, is_predicted ? kAcceptedRank + given_up : 0, now);
  }
}

// End a sequence whose prompt is computed: its vector is delivered, unless it is none. Runs on: one lane.
template <class Env>
BLINK_FN void end_pooled(Env& env, State& s, const StepBuffers& a, const Row& row, Sequence& q, uint64_t now) {
  if (row.num_samples == 0) return;
  end_without_token(env, s, q, is_vector(a, row) ? FinishReason::kStop : FinishReason::kError, now);
}

// Take over what one row computed and sampled. Runs on: one lane.
template <class Env>
BLINK_FN void retire_row(Env& env, State& s, const StepBuffers& a, const Row& row, Sequence& q, uint64_t now) {
  q.num_computed += certain_tokens(row);
  q.row = Row{};
  q.paused_tokens = q.state_lag = 0;
  if (q.cancelled || s.qps[q.queue_pair].closing) return;
  if (is_pooling(s.geometry)) return end_pooled(env, s, a, row, q, now);
  const uint32_t before = q.num_generated;
  take_samples(env, s, a, row, q, now);
  const uint32_t taken = q.num_generated - before;
  if (row.kind == RowKind::kVerify && taken > 0) {
    q.num_computed += q.state_lag = taken - 1;
    take_back_places(s, q);
    note_draft(env, s, q, row.num_samples - 1, taken - 1);
  }
  note_delivery(s, q, taken, now);
}

// Count what the step's drafts came to, and let the prefix cache know the blocks that accepted tokens filled.
template <class Env>
BLINK_RARE_FN void close_drafts(Env& env, State& s, const StepBuffers& a) {
  register_blocks(env, s, a);
  if (env.lane() == 0) count_drafts(s);
  env.sync();
}

// Tokens that a step sampled, and sequences that ended with it.
struct RetireTotals {
  uint32_t sampled, stopped, filled, failed;
};
BLINK_FN RetireTotals operator+(RetireTotals a, RetireTotals b) {
  return {a.sampled + b.sampled, a.stopped + b.stopped, a.filled + b.filled, a.failed + b.failed};
}

template <class Env>
BLINK_RARE_FN void retire(Env& env, State& s, StepKind kind, uint64_t now) {
  const StepBuffers& a = buffers_of(s, kind);
  const uint32_t rows = a.header->num_rows;
  if (is_scoring(s.geometry, a.header->graph)) deliver_prompt_logprobs(env, s, a, now);
  if (is_pooling(s.geometry)) deliver_vectors(env, s, a);
  RetireTotals totals{0, 0, 0, 0};
  for (uint32_t i = env.lane(); i < rows; i += env.lanes()) {
    const Row row = a.rows[i];
    if (row.kind == RowKind::kNone) continue;
    Sequence& q = s.sequences[row.sequence];
    const uint32_t before = q.num_generated;
    retire_row(env, s, a, row, q, now);
    totals.sampled += q.num_generated - before;
    totals.stopped += q.finish == FinishReason::kStop;
    totals.filled += q.finish == FinishReason::kLength;
    totals.failed += q.finish == FinishReason::kError;
  }
  totals = env.sum(totals);
  for (uint32_t qp = env.lane(); qp < s.geometry.num_queue_pairs; qp += env.lanes())
    (kind == StepKind::kWhole ? s.qps[qp].cq_need : s.qps[qp].cq_held) = 0;
  if (env.lane() == 0) {
    s.statistics.generation_tokens += totals.sampled;
    s.statistics.finished_stop += totals.stopped;
    s.statistics.finished_length += totals.filled;
    s.statistics.finished_error += totals.failed;
  }
  env.sync();
  if (kind == StepKind::kWhole && has_siblings(s)) close_drafts(env, s, a);
  if (totals.stopped + totals.filled + totals.failed == 0) return;
  end_finished(env, s, SequenceStatus::kRunning);
  if (kind == StepKind::kSegmented) end_finished(env, s, SequenceStatus::kWaiting);  // parked while it was paused
}

// Take over a step that was launched in segments.
template <class Env>
BLINK_FN void close_segments(Env& env, State& s, uint64_t now) {
  retire(env, s, StepKind::kSegmented, now);
  if (env.lane() == 0) {
    const uint32_t graph = s.segmented.header->graph;
    if (has_costs(s)) learn(s, graph, s.segmented_cost_ns, s.segmented_ns);
    if (s.segmented_class != StepClass::kBestEffort) s.urgent_ns = now;
    s.num_segments = 0;
  }
  env.sync();
}

// Take over what the launch that is over has done: a step, or one more of its segments.
template <class Env>
BLINK_FN void end_launch(Env& env, State& s, uint64_t now) {
  const StepKind kind = kind_in_flight(s);
  const bool is_last = kind == StepKind::kSegmented && is_last_segment(s);
  env.sync();
  if (env.lane() == 0) {
    s.in_flight = 0;
    end_account(s, now);
    if (kind == StepKind::kSegmented && !is_last) s.segment++;
    if (kind == StepKind::kWhole && s.account.step_class != StepClass::kBestEffort) s.urgent_ns = now;
  }
  if (kind == StepKind::kWhole) retire(env, s, StepKind::kWhole, now);
  if (is_last) close_segments(env, s, now);
  env.sync();
}

}  // namespace blink
