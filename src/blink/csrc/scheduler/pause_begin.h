// SPDX-License-Identifier: Apache-2.0
// The beginning of a pause (pause.h): what it takes away, and the word that it is in effect.
#pragma once

#include "scheduler/admission.h"
#include "scheduler/cache_reset.h"
#include "scheduler/pause.h"

namespace blink {

// Take the KV of every sequence away: they wait, and compute it anew.
template <class Env>
BLINK_RARE_FN void retract_all(Env& env, State& s, uint64_t now) {
  while (s.num_running > 0) preempt(env, s, s.running[s.num_running - 1], false, now);
  for (uint32_t i = 0; i < s.num_waiting; i++)
    if (s.sequences[s.waiting[i]].num_blocks > 0) preempt(env, s, s.waiting[i], false, now);
}

// Carry out what was asked of a pause; nothing is in flight. Then say that it is in effect.
// Orders: all that was taken away before `held` and `state` (release).
template <class Env>
BLINK_RARE_FN void begin_pause(Env& env, State& s, uint64_t now) {
  if (s.pause_drop == Drop::kKvCache || s.pause_mode == PauseMode::kRetract) retract_all(env, s, now);
  if (s.pause_drop != Drop::kNothing) reset_prefix_cache(env, s);
  env.sync();
  if (env.lane() == 0) {
    s.pause_asked = 0;
    s.pause_drop = Drop::kNothing;
    s.statistics.num_pauses += s.pause_mode != PauseMode::kNone;
    s.stats_dirty = 1;
    s.held = s.hold;
    if (s.engine_state == uint32_t(EngineState::kReady)) s.engine_state = uint32_t(EngineState::kPaused);
    store_release(s.control->held, s.held);
    store_release(s.control->state, s.engine_state);
  }
  env.sync();
}

}  // namespace blink
