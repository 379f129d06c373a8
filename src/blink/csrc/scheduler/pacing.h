// SPDX-License-Identifier: Apache-2.0
// Pacing: a launch waits while no running sequence's next token is due, so that each step has more rows and the GPU
// rests between steps. Without targets nothing here changes a decision. docs/pacing.md has the reasons.
//
// A sequence with a target T has a due time: that of its first token plus T, and T more with each token. It is never
// much more than T from now. Tokens that came late are made up for by sooner ones, within bounds.
#pragma once

#include "scheduler/cost.h"

namespace blink {

constexpr uint64_t kMostBehind = 8;        // targets that a sequence may be behind its pace, and make up for
constexpr uint64_t kMostAhead = 8;         // part of a target that it may be ahead: launches in time are early
constexpr uint64_t kPaceMargin = 16;       // part of a step's predicted time by which it is launched sooner
constexpr uint64_t kComposingNs = 100000;  // the same, for what composing takes

// Time between two tokens that a sequence asks for; 0: none, each is wanted as soon as possible.
BLINK_FN uint64_t tpot_target_ns(const State& s, const Sequence& q) {
  const uint32_t own = q.sqe.tpot_target_us;
  const uint64_t target = own == kNoTpotTarget ? 0 : own > 0 ? uint64_t(own) * 1000 : s.geometry.tpot_target_ns;
  const uint64_t urgent = s.geometry.urgent_tpot_target_ns;
  const bool is_bound = urgent > 0 && q.sqe.service_class == uint32_t(ServiceClass::kLatencySensitive);
  return is_bound ? least(target, urgent) : target;
}

// Move a sequence's due time on by the tokens that were delivered. Runs on: one lane.
BLINK_FN void note_delivery(const State& s, Sequence& q, uint32_t num_tokens, uint64_t now) {
  if (s.num_paced == 0 || num_tokens == 0) return;  // before a word of the sequence is read
  const uint64_t target = tpot_target_ns(s, q);
  if (target == 0) return;
  const uint64_t ahead = target / kMostAhead, behind = least(now, kMostBehind * target);
  const uint64_t due = q.due_ns > 0 ? least(q.due_ns, now + ahead) : now;
  q.due_ns = most(due + num_tokens * target, now - behind);
}

// Whether the next launch may wait at all: all live sequences have a target and run, and no step is half done.
BLINK_FN bool may_hold(const State& s) {
  return s.num_paced > 0 && s.num_paced == s.num_live && s.num_waiting == 0 && !is_segmented(s) && has_costs(s) &&
         s.engine_state == uint32_t(EngineState::kReady);
}

// When to launch a step that is predicted to take `cost` and whose first token is due then.
BLINK_FN uint64_t launch_time(uint64_t due, uint64_t cost) {
  const uint64_t lead = cost + cost / kPaceMargin + kComposingNs;
  return due > lead ? due - lead : 0;
}

// Note when the first token after those of the step in flight is due, if all its rows go on.
template <class Env>
BLINK_FN void prepare_hold(Env& env, State& s) {
  if (!may_hold(s)) return;
  uint64_t due = ~0ull, target = ~0ull;
  for (uint32_t i = env.lane(); i < s.num_running; i += env.lanes()) {
    const Sequence& q = s.sequences[s.running[i]];
    const uint64_t own = tpot_target_ns(s, q);
    due = least(due, q.due_ns + own);
    target = least(target, own);
  }
  due = env.least(due);
  target = env.least(target);
  if (env.lane() == 0) {
    s.next_due_ns = due;
    s.least_target_ns = target;
  }
  env.sync();
}

// Whether the fast path is to be left, since its step would wait: the tokens of the one that is over come first.
BLINK_FN bool expects_hold(const State& s, uint64_t now) {
  if (!may_hold(s) || !s.fast_path_ready) return false;
  const uint64_t due = least(s.next_due_ns, now + s.least_target_ns + s.least_target_ns / kMostAhead);
  return now < launch_time(due, predict_ns(s, s.account.graph, s.account.kv_tokens + s.num_running));
}

// When the next step may be launched at the soonest; 0: at once. A prompt that is half computed waits for nothing.
template <class Env>
BLINK_RARE_FN uint64_t hold_end(Env& env, const State& s) {
  if (!may_hold(s)) return 0;
  uint64_t due = ~0ull, kv_tokens = 0;
  for (uint32_t i = env.lane(); i < s.num_running; i += env.lanes()) {
    const Sequence& q = s.sequences[s.running[i]];
    due = least(due, is_decoding(q) ? q.due_ns : 0);
    kv_tokens += q.num_tokens;
  }
  due = env.least(due);
  return launch_time(due, predict_decode_ns(s, s.num_running, env.sum(kv_tokens)));
}

// Begin, go on with or end a hold. Runs on: one lane.
BLINK_FN void set_hold(State& s, uint64_t until, uint64_t now) {
  if (until > 0 && s.held_until_ns == 0) s.held_since_ns = now;
  if (until == 0 && s.held_until_ns > 0) s.statistics.held_ns += now - s.held_since_ns;
  s.held_until_ns = until;
}

// Whether the next launch waits, for the time being. Every lane gets the same answer.
template <class Env>
BLINK_FN bool hold(Env& env, State& s, uint64_t now) {
  if (s.num_paced == 0 && s.held_until_ns == 0) return false;
  const uint64_t until = hold_end(env, s);
  env.sync();
  if (env.lane() == 0) set_hold(s, now < until ? until : 0, now);
  env.sync();
  return now < until;
}

}  // namespace blink
