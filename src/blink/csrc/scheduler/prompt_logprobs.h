// SPDX-License-Identifier: Apache-2.0
// Prompt logprobs: those of a prompt's own tokens, computed in the steps that compute the prompt anyway. Such a step
// runs a graph that keeps the logits of every token, chunk after chunk, instead of each row's last.
#pragma once

#include "scheduler/queue_pair.h"
#include "scheduler/step_kind.h"

namespace blink {

// Whether logprobs of prompt tokens are still to be delivered. Their KV must be computed, also where it is cached.
BLINK_FN bool wants_prompt_logprobs(const Sequence& q) {
  return q.sqe.sampling.num_prompt_logprobs > 0 && q.num_delivered_logprobs + 1 < q.sqe.num_prompt_tokens;
}

// How many tokens of a prompt a step may compute at most, so that there is room for their logprobs.
BLINK_FN uint32_t max_logprob_tokens(const State& s, const Sequence& q) {
  if (!wants_prompt_logprobs(q)) return kNone;
  return cq_room(s, s.qps[q.queue_pair]) / q.sqe.sampling.num_prompt_logprobs;
}

// Positions first .. end whose logits give logprobs that were not delivered, of those that the step computes. The
// logits of position p give the logprob of the token at p + 1.
struct LogprobSpan {
  uint32_t first, end;
};
BLINK_FN LogprobSpan logprob_span(const Sequence& q) {
  if (!wants_prompt_logprobs(q)) return {0, 0};
  const uint32_t first = q.num_delivered_logprobs > q.num_computed ? q.num_delivered_logprobs : q.num_computed;
  const uint32_t computed = q.num_computed + q.row.num_tokens, last = q.sqe.num_prompt_tokens - 1;
  return {first, computed < last ? computed : last};
}

// Whether the step that is being composed gives logprobs of the sequence's prompt.
BLINK_FN bool has_prompt_logprobs(const Sequence& q) {
  const LogprobSpan span = logprob_span(q);
  return span.first < span.end;
}

// Post the prompt logprobs of one row; `from` is the place in the batch of its first position. Runs on: all lanes.
template <class Env>
BLINK_FN void deliver_row(Env& env, State& s, const StepBuffers& a, Sequence& q, LogprobSpan span, uint32_t from,
                          uint64_t now) {
  const uint32_t each = q.sqe.sampling.num_prompt_logprobs, start = s.qps[q.queue_pair].cq_tail;
  const int32_t* prompt = s.tokens + uint64_t(q.slot) * s.geometry.max_model_len;
  env.sync();
  for (uint32_t i = env.lane(); i < (span.end - span.first) * each; i += env.lanes()) {
    const uint32_t at = from + i / each, rank = i % each, position = span.first + i / each + 1;
    const uint32_t top = at * kMaxLogprobs + rank;
    const bool is_top = rank + 1 < each;
    const int32_t token = is_top ? a.prompt_top_tokens[top] : prompt[position];
    const float logprob = is_top ? a.prompt_top_logprobs[top] : a.prompt_logprobs[at];
    post_at(s, q.queue_pair, start + i, Cqe{q.sqe.sequence, now, token, logprob, position, 0},
            is_top ? CqeKind::kTopLogprob : CqeKind::kPromptLogprob, FinishReason::kNone, rank);
  }
  env.sync();
  if (env.lane() == 0) {
    s.qps[q.queue_pair].cq_tail += (span.end - span.first) * each;
    q.num_delivered_logprobs = span.end;
  }
  env.sync();
}

// Post the logprobs that a step of a scoring graph gave, in the order of positions. Before retire() counts its tokens
// as computed.
template <class Env>
BLINK_RARE_FN void deliver_prompt_logprobs(Env& env, State& s, const StepBuffers& a, uint64_t now) {
  const uint32_t num_rows = a.header->num_rows;
  for (uint32_t i = 0; i < num_rows; i++) {
    const Row row = a.rows[i];
    Sequence& q = s.sequences[row.sequence];
    const LogprobSpan span = logprob_span(q);
    if (span.first >= span.end || q.cancelled || s.qps[q.queue_pair].closing) continue;
    deliver_row(env, s, a, q, span, row.first_token + span.first - q.num_computed, now);
  }
  env.sync();  // what follows changes what all lanes have looked at
}

}  // namespace blink
