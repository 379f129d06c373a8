// SPDX-License-Identifier: Apache-2.0
// Pause: nothing is launched until somebody resumes. Frontends ask for it by entries; the engine's host by
// Control::hold, while it changes the model's memory. Requests that come meanwhile wait in the queue.
//
// A step in flight ends first, and so does one that is launched in segments: then nothing of it is half computed.
#pragma once

#include "scheduler/state.h"

namespace blink {

// Whether nothing more is to be launched. Waiting for running sequences, it is so when none runs.
BLINK_FN bool is_pausing(const State& s) {
  const bool waits = s.pause_mode == PauseMode::kWait && s.num_running > 0;
  return s.hold != 0 || (s.pause_mode != PauseMode::kNone && !waits);
}

// Whether a pause is to begin as soon as nothing is in flight.
BLINK_FN bool pause_begins(const State& s) {
  return is_pausing(s) && (s.pause_asked || s.engine_state == uint32_t(EngineState::kReady));
}

// Let all sequences of a list end. Runs on: one lane.
BLINK_FN void cancel_all(State& s, const uint32_t* list, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    Sequence& q = s.sequences[list[i]];
    if (!q.cancelled) s.num_cancels++;
    q.cancelled = 1;
  }
}

// Let every sequence end. Runs on: one lane.
BLINK_RARE_FN void abort_all(State& s) {
  cancel_all(s, s.running, s.num_running);
  cancel_all(s, s.waiting, s.num_waiting);
}

// Note that a pause is to take something away when it begins. Runs on: one lane.
BLINK_FN void ask_pause(State& s, Drop drop) {
  s.pause_asked = 1;
  if (uint32_t(drop) > uint32_t(s.pause_drop)) s.pause_drop = drop;
}

BLINK_FN bool is_pause(const Sqe& e) {
  return e.pause_mode > uint32_t(PauseMode::kNone) && e.pause_mode <= uint32_t(PauseMode::kRetract) &&
         e.pause_drop <= uint32_t(Drop::kPrefixCache);
}

// Pause as a frontend asks, by an entry that is_pause() has found right. Runs on: one lane.
BLINK_RARE_FN void accept_pause(State& s, const Sqe& e) {
  s.pause_mode = PauseMode(e.pause_mode);
  ask_pause(s, Drop(e.pause_drop));
  if (s.pause_mode == PauseMode::kAbort) abort_all(s);
}

// Take the frontends' pause back; the host's hold stays. Runs on: one lane.
BLINK_RARE_FN void accept_resume(State& s) {
  s.statistics.num_pauses += s.pause_asked && s.pause_mode != PauseMode::kNone;
  s.pause_mode = PauseMode::kNone;
  s.pause_asked = s.hold != s.held;
}

// Follow Control::hold, which has changed. Runs on: one lane.
// Orders: `hold` (acquire) before `hold_drop`.
BLINK_RARE_FN void follow_hold(State& s) {
  s.hold = load_acquire(s.control->hold);
  if (s.hold != 0) return ask_pause(s, Drop(load_relaxed(s.control->hold_drop)));
  s.held = 0;
  store_release(s.control->held, s.held);
}

// Whether the scheduler is to give its device up: nothing is in flight, and nothing is launched before the host has
// started it again. Only then may the host allocate on a GPU, or wait for it.
template <class Env>
BLINK_FN bool is_to_leave(Env& env, const State& s) {
  if (s.held == 0) return false;
  return env.share(env.lane() == 0 && load_acquire(s.control->leave) == s.held);
}

// A server that drains lifts the frontends' pause. While its host holds it, nobody can be served any more. Runs on: one
// lane.
BLINK_RARE_FN void drain_pause(State& s) {
  if (s.pause_mode != PauseMode::kNone) accept_resume(s);
  if (s.hold != 0 && s.num_live > s.num_cancels) abort_all(s);
}

}  // namespace blink
