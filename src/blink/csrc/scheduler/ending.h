// SPDX-License-Identifier: Apache-2.0
// How sequences end: complete, cancelled, or because their frontend has gone.
#pragma once

#include "scheduler/adapters.h"
#include "scheduler/answers.h"
#include "scheduler/automata.h"
#include "scheduler/kv_cache.h"
#include "scheduler/list.h"
#include "scheduler/pacing.h"
#include "scheduler/policy.h"
#include "scheduler/queue_pair.h"
#include "scheduler/snapshots.h"

namespace blink {

// Free everything that a sequence holds. The caller has posted its last completion and compacts its list.
template <class Env>
BLINK_RARE_FN void free_sequence(Env& env, State& s, uint32_t index) {
  Sequence& q = s.sequences[index];
  if (q.num_blocks > 0) release_all_blocks(env, s, q);
  if (q.slot != kNone) release_automaton(env, s, q);
  env.sync();
  if (env.lane() == 0) {
    drop_snapshot(s, q);
    leave_adapter(s, q);
    if (q.slot != kNone) {
      s.free_slots[s.num_free_slots++] = q.slot;
      s.qps[q.queue_pair].num_slots--;
    }
    if (q.cancelled) s.num_cancels--;
    Flow& flow = flow_of(s, q);
    if (q.status == SequenceStatus::kRunning) flow.num_running--;
    if (--flow.num_live == 0) s.num_flows--;
    s.num_best_effort -= q.sqe.service_class == uint32_t(ServiceClass::kBestEffort);
    s.num_paced -= tpot_target_ns(s, q) > 0;
    s.qps[q.queue_pair].num_live--;
    s.num_live--;
    s.stats_dirty = 1;
    q.status = SequenceStatus::kFree;
  }
  env.sync();
}

// Sequences of one list, in s.scratch, for which `chosen` holds; returns how many.
template <class Env, class Chosen>
BLINK_FN uint32_t collect(Env& env, State& s, SequenceStatus status, Chosen chosen) {
  const bool running = status == SequenceStatus::kRunning;
  return compact(env, running ? s.running : s.waiting, running ? s.num_running : s.num_waiting, s.scratch,
                 [&](uint32_t i) { return chosen(s.sequences[i]); });
}

// End the sequences of one list whose last token was delivered.
template <class Env>
BLINK_RARE_FN void end_finished(Env& env, State& s, SequenceStatus status) {
  const uint32_t ended = collect(env, s, status, [](const Sequence& q) { return q.finish != FinishReason::kNone; });
  if (has_answers(s)) keep_answers(env, s, ended);
  for (uint32_t n = 0; n < ended; n++) free_sequence(env, s, s.scratch[n]);
  if (ended > 0) keep_only(env, s, status);
}

// End the cancelled sequences of one list and those of closing queue pairs. A cancellation without room for its
// completion waits, and so does all that takes part in a paused step.
template <class Env>
BLINK_RARE_FN void reap_list(Env& env, State& s, SequenceStatus status, uint64_t now) {
  const uint32_t doomed = collect(env, s, status, [&](const Sequence& q) {
    return (q.cancelled || s.qps[q.queue_pair].closing) && q.paused_tokens == 0;
  });
  for (uint32_t n = 0; n < doomed; n++) {
    const uint32_t index = s.scratch[n];
    const Sequence& q = s.sequences[index];
    const QueuePairState& pair = s.qps[q.queue_pair];
    if (!pair.closing && cq_room(s, pair) == 0) continue;
    env.sync();
    if (env.lane() == 0) {
      if (!pair.closing) post(s, q.queue_pair, q.sqe.sequence, CqeKind::kFinished, FinishReason::kAbort, 0, now);
      s.statistics.finished_abort++;
    }
    free_sequence(env, s, index);
  }
  if (doomed > 0) keep_only(env, s, status);
}

template <class Env>
BLINK_FN void reap(Env& env, State& s, uint64_t now) {
  uint32_t closing = 0;
  for (uint32_t qp = env.lane(); qp < s.geometry.num_queue_pairs; qp += env.lanes())
    closing += s.qps[qp].closing ? s.qps[qp].num_live : 0;
  if (env.sum(closing) + s.num_cancels == 0) return;
  reap_list(env, s, SequenceStatus::kRunning, now);
  reap_list(env, s, SequenceStatus::kWaiting, now);
}

}  // namespace blink
