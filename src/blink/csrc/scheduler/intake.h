// SPDX-License-Identifier: Apache-2.0
// What comes in: leases, attachment of frontends, and new SQEs.
#pragma once

#include "scheduler/flow.h"
#include "scheduler/pacing.h"
#include "scheduler/pause.h"
#include "scheduler/queue_pair.h"

namespace blink {

constexpr uint64_t kHeartbeatNs = 1000000;
// Advance the clock of lease timeouts. Where the whole machine paused, or only this processor, frontends may have been
// kept from their leases for as long: no more than half a lease of it counts. Runs on: one lane.
BLINK_FN void stay_awake(State& s, uint64_t now) {
  if (now > s.pass_ns) s.awake_ns += least(now - s.pass_ns, s.geometry.lease_timeout_ns / 2);
  s.pass_ns = now;
}

// Let nobody own the queue pair; its sequences end without completions. Runs on: one lane.
BLINK_FN void detach(State& s, uint32_t qp) {
  QueuePairState& q = s.qps[qp];
  q.attached = 0;
  q.closing = 1;
  store_release(scheduler_words(s, qp).attached, 0u);
}

// Hand the queue pair to the frontend that asked, once nothing of the last owner is left. Runs on: one lane.
// Orders: sq_head and cq_tail before `attached` (release), where the frontend starts from.
BLINK_FN void attach(State& s, uint32_t qp) {
  QueuePairState& q = s.qps[qp];
  SchedulerWords& words = scheduler_words(s, qp);
  q.sq_head = q.sq_tail;
  q.closing = 0;
  q.lease_seen_ns = q.flowing_ns = s.awake_ns;
  q.attached = q.attaching;
  q.attaching = 0;
  store_relaxed(words.sq_head, q.sq_head);
  store_relaxed(words.cq_tail, q.cq_tail);
  store_release(words.attached, q.attached);
}

// Take over how far the frontend has read; false if it has left a full queue unread for too long.
BLINK_FN bool follow_reader(const State& s, QueuePairState& q, uint32_t head) {
  const bool reads = head != q.cq_head && q.cq_tail - head <= s.geometry.cq_entries;
  q.cq_head = head;
  if (reads || !is_blocked(s, q)) q.flowing_ns = s.awake_ns;
  return s.awake_ns - q.flowing_ns <= s.geometry.stall_timeout_ns;
}

// Read what a frontend has written last: one access, for each is a round trip to the host. Three loads of a word each,
// made every 5 us while a step runs, slow the step by a sixth; this one costs it nothing.
BLINK_FN FrontendWords read_words(const State& s, uint32_t qp) {
  uint32_t seen[4];
  load_acquire(reinterpret_cast<const uint32_t*>(&frontend_words(s, qp)), seen);
  return FrontendWords{seen[0], seen[1], seen[2], seen[3]};
}

// Read the frontend's words and act on them. Runs on: one lane for each queue pair.
template <class Env>
BLINK_RARE_FN void read_frontend(Env& env, State& s, uint32_t qp) {
  QueuePairState& q = s.qps[qp];
  const auto [tail, head, lease, wanted] = read_words(s, qp);
  q.sq_tail = tail;
  if (lease != q.lease) {
    q.lease = lease;
    q.lease_seen_ns = s.awake_ns;
  }
  if (wanted != q.last_attach) {
    q.last_attach = wanted;
    q.attaching = wanted;
    // As the last owner left it, where attach() lets the new one begin.
    q.sq_tail = load_acquire(frontend_words(s, qp).sq_tail);
    detach(s, qp);
  }
  const bool is_read = follow_reader(s, q, head);
  const bool is_silent = s.awake_ns - q.lease_seen_ns > s.geometry.lease_timeout_ns;
  if (q.attached && (is_silent || !is_read)) {
    detach(s, qp);
    q.expired++;
    env.fetch_add(s.stats_dirty, 1);  // as other lanes may: no step may come that publishes it
  }
  if (q.attached && q.sq_tail - q.sq_head > s.geometry.sq_entries) detach(s, qp);
  if (q.attaching && q.num_live == 0) attach(s, qp);
}

// Whether a frontend has done something that a pass would act on; its lease alone is nothing. Runs on: one lane.
BLINK_FN bool has_news(const State& s, uint32_t qp) {
  const QueuePairState& q = s.qps[qp];
  const auto [tail, head, lease, attach] = read_words(s, qp);
  return tail != q.sq_tail || head != q.cq_head || attach != q.last_attach;
}

BLINK_RARE_FN void reject(State& s, uint32_t qp, uint64_t sequence, RejectCode code, uint64_t now) {
  post(s, qp, sequence, CqeKind::kRejected, FinishReason::kError, int32_t(code), now);
  s.statistics.num_rejected++;
}

BLINK_FN bool takes_requests(const State& s) {
  return s.engine_state == uint32_t(EngineState::kReady) || s.engine_state == uint32_t(EngineState::kPaused);
}

BLINK_FN void accept_submit(State& s, uint32_t qp, const Sqe& e, uint64_t now) {
  const Geometry& g = s.geometry;
  const uint32_t tag = uint32_t(e.sequence);
  RejectCode code = tag < g.sequences_per_queue_pair ? validate(g, e) : RejectCode::kTag;
  if (code == RejectCode::kNone && !may_use_adapter(s, e)) code = RejectCode::kAdapter;
  const uint32_t index = qp * g.sequences_per_queue_pair + (code == RejectCode::kTag ? 0 : tag);
  if (code == RejectCode::kNone && s.sequences[index].status != SequenceStatus::kFree) code = RejectCode::kTagBusy;
  if (code == RejectCode::kNone && !takes_requests(s)) code = RejectCode::kDraining;
  if (code != RejectCode::kNone) return reject(s, qp, e.sequence, code, now);
  Sequence& q = s.sequences[index];
  q = Sequence{};
  q.status = SequenceStatus::kWaiting;
  q.queue_pair = qp;
  q.slot = q.automaton = kNone;
  q.num_tokens = e.num_prompt_tokens;
  q.num_hashed = e.num_hashes;
  q.skipped_pass = kNone;
  q.arrival = s.next_arrival++;
  q.queued_ns = now;
  q.sqe = e;
  s.waiting[s.num_waiting++] = index;
  join_flow(s, q);
  join_adapter(s, q);
  s.num_best_effort += e.service_class == uint32_t(ServiceClass::kBestEffort);
  s.num_paced += tpot_target_ns(s, q) > 0;
  s.qps[qp].num_live++;
  s.num_live++;
}

BLINK_FN void accept_cancel(State& s, uint32_t qp, const Sqe& e, uint64_t now) {
  const uint32_t tag = uint32_t(e.sequence);
  if (tag >= s.geometry.sequences_per_queue_pair) return reject(s, qp, e.sequence, RejectCode::kTag, now);
  Sequence& q = s.sequences[qp * s.geometry.sequences_per_queue_pair + tag];
  if (q.status == SequenceStatus::kFree || q.sqe.sequence != e.sequence)
    return reject(s, qp, e.sequence, RejectCode::kUnknownSequence, now);
  if (!q.cancelled) s.num_cancels++;
  q.cancelled = 1;
}

BLINK_RARE_FN void accept(State& s, uint32_t qp, const Sqe& e, uint64_t now) {
  if (e.opcode == uint32_t(Opcode::kSubmit)) return accept_submit(s, qp, e, now);
  if (e.opcode == uint32_t(Opcode::kCancel)) return accept_cancel(s, qp, e, now);
  if (e.opcode == uint32_t(Opcode::kResetPrefixCache)) {
    s.reset_asked = 1;
    return;
  }
  if (e.opcode == uint32_t(Opcode::kPause) && is_pause(e)) return accept_pause(s, e);
  if (e.opcode == uint32_t(Opcode::kResume)) return accept_resume(s);
  reject(s, qp, e.sequence, RejectCode::kOpcode, now);
}

// Tell the frontends that the scheduler lives, and follow the engine's words. Runs on: one lane.
BLINK_FN void beat(State& s, uint64_t now) {
  if (now - s.heartbeat_ns >= kHeartbeatNs) {
    s.heartbeat_ns = now;
    store_release(s.control->heartbeat, ++s.heartbeat);
    follow_adapters(s);
  }
  const uint32_t drain = load_relaxed(s.control->drain), stop = load_relaxed(s.control->stop),
                 hold = load_relaxed(s.control->hold);  // all at once
  if (hold != s.hold) follow_hold(s);
  if (drain) drain_pause(s);
  uint32_t state = s.engine_state;
  if (state == uint32_t(EngineState::kPaused) && !is_pausing(s)) state = uint32_t(EngineState::kReady);
  if (takes_requests(s) && drain) state = uint32_t(EngineState::kDraining);
  if (state == uint32_t(EngineState::kDraining) && s.num_live == 0) state = uint32_t(EngineState::kDrained);
  if (stop) state = uint32_t(EngineState::kStopped);
  if (state == s.engine_state) return;
  s.engine_state = state;
  store_release(s.control->state, state);
}

// Take new SQEs of one queue pair: all are read at once, for a read of the host's memory is a long way. An SQE stays in
// its queue until its answer has room in the completion queue.
template <class Env>
BLINK_FN void take_entries(Env& env, State& s, uint32_t qp, uint64_t now) {
  QueuePairState& q = s.qps[qp];
  const uint32_t count = q.attached ? least(q.sq_tail - q.sq_head, kPollBatch) : 0;
  if (count == 0 || cq_room(s, q) == 0) return;
  constexpr uint32_t kWords = sizeof(Sqe) / 4;
  const uint32_t head = q.sq_head;
  Word* to = reinterpret_cast<Word*>(s.inbox);
  for (uint32_t i = env.lane(); i < count * kWords; i += env.lanes())
    to[i] = reinterpret_cast<const Word*>(&sq_entry(s, qp, head + i / kWords))[i % kWords];
  env.sync();
  if (env.lane() == 0) {
    for (uint32_t n = 0; n < count && cq_room(s, q) > 0; n++, q.sq_head++) accept(s, qp, s.inbox[n], now);
    store_release(scheduler_words(s, qp).sq_head, q.sq_head);
    s.stats_dirty = 1;
  }
  env.sync();
}

// Follow the engine's words and those of every frontend, and take new SQEs.
template <class Env>
BLINK_RARE_FN void poll(Env& env, State& s, uint64_t now) {
  // Another lane than those of the first queue pairs, so that the words of the host are read side by side.
  if (env.lane() == env.lanes() - 1) beat(s, now);
  for (uint32_t qp = env.lane(); qp < s.geometry.num_queue_pairs; qp += env.lanes()) read_frontend(env, s, qp);
  env.sync();
  for (uint32_t qp = 0; qp < s.geometry.num_queue_pairs; qp++) take_entries(env, s, qp, now);
}

}  // namespace blink
