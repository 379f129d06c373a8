// SPDX-License-Identifier: Apache-2.0
// Lists of sequences: kept in order while lanes work on them side by side.
#pragma once

#include "scheduler/state.h"

namespace blink {

// Write those of value_at(0 .. count - 1) to `to` that `keep` admits, in order, and return how many those are.
template <class Env, class At, class Keep>
BLINK_FN uint32_t select(Env& env, uint32_t count, At value_at, uint32_t* to, Keep keep) {
  uint32_t kept = 0;
  for (uint32_t tile = 0; tile < count; tile += env.lanes()) {
    const uint32_t i = tile + env.lane();
    const uint32_t value = i < count ? value_at(i) : kNone;
    const bool stays = i < count && keep(value);
    uint32_t total = 0;
    const uint32_t rank = env.scan(stays, total);  // synchronises: the tile is read before it is overwritten
    if (stays) to[kept + rank] = value;
    kept += total;
  }
  env.sync();
  return kept;
}

// The same of a list's entries, which may be written over.
template <class Env, class Keep>
BLINK_FN uint32_t compact(Env& env, const uint32_t* from, uint32_t count, uint32_t* to, Keep keep) {
  return select(env, count, [=](uint32_t i) { return from[i]; }, to, keep);
}

template <class Env>
BLINK_FN void set_word(Env& env, uint32_t& word, uint32_t value) {
  env.sync();
  if (env.lane() == 0) word = value;
  env.sync();
}

template <class Env>
BLINK_RARE_FN void keep_only(Env& env, State& s, SequenceStatus status) {
  const bool running = status == SequenceStatus::kRunning;
  uint32_t* list = running ? s.running : s.waiting;
  uint32_t& count = running ? s.num_running : s.num_waiting;
  set_word(env, count, compact(env, list, count, list, [&](uint32_t q) { return s.sequences[q].status == status; }));
}

}  // namespace blink
