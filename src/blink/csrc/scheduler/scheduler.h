// SPDX-License-Identifier: Apache-2.0
// One bounded pass of the scheduler. The endless loop around it belongs to the host thread or the resident kernel.
//
// Env: lane() lanes() sync() now() outcome(output, step) launch(graph, segment) copy(order) fetch_add(word, n)
// raise(word, n). Its collectives over the lanes: share(x) of lane 0, scan(x, total) exclusive prefix sum, sum(x),
// least(x), most(x).
#pragma once

#include "scheduler/fast_path.h"
#include "scheduler/pause_begin.h"
#include "scheduler/step_class.h"

namespace blink {

// Set the initial state of arrays that are not zero at the start, then say that the engine is ready.
template <class Env>
BLINK_RARE_FN void boot(Env& env, State& s) {
  const Geometry& g = s.geometry;
  for (uint32_t i = env.lane(); i < g.num_blocks; i += env.lanes()) s.free_blocks[i] = g.num_blocks - 1 - i;
  for (uint32_t i = env.lane(); i < g.num_window_blocks; i += env.lanes())
    s.free_window_blocks[i] = g.num_window_blocks - 1 - i;
  for (uint32_t i = env.lane(); i < g.num_slots; i += env.lanes()) s.free_slots[i] = g.num_slots - 1 - i;
  env.sync();
  if (env.lane() == 0) {
    s.num_free_blocks = g.num_blocks;
    s.num_free_window_blocks = g.num_window_blocks;
    s.num_free_slots = g.num_slots;
    const auto* key = reinterpret_cast<const uint64_t*>(s.header->hash_key);
    s.hash_key_low = key[0];
    s.hash_key_high = key[1];
    const auto* root = reinterpret_cast<const uint64_t*>(s.header->kv_event_root);
    s.events.root_low = root[0];
    s.events.root_high = root[1];
    s.engine_state = uint32_t(EngineState::kReady);
    s.booted = s.stats_dirty = 1;
    store_release(s.control->state, s.engine_state);
  }
  env.sync();
}

BLINK_FN void count_step(State& s, const BatchHeader& b) {
  s.statistics.num_steps++;
  s.statistics.computed_tokens += b.num_tokens;
  s.statistics.padded_tokens += s.geometry.graphs[b.graph].tokens - b.num_tokens;
  (is_decode_graph(s.geometry, b.graph) ? s.statistics.decode_launches : s.statistics.mixed_launches)++;
}

// Note that the last launch has ended. Runs on: one lane.
BLINK_FN void note_end(State& s, uint64_t step, uint64_t ended_ns) {
  s.statistics.running_ns += ended_ns - s.launched_ns;
  s.trace[step & (s.geometry.trace_entries - 1)].ended_ns = ended_ns;
}

// Note what was launched, and the end of what was before. Runs on: one lane.
BLINK_FN void trace_launch(State& s, const BatchHeader& b, uint64_t launched_ns, bool idle_before) {
  if (!idle_before) note_end(s, s.step - 1, s.retired_ns);
  s.statistics.scheduling_ns += launched_ns - s.retired_ns;
  s.launched_ns = launched_ns;
  const Account& a = s.account;
  s.trace[s.step & (s.geometry.trace_entries - 1)] = TraceEntry{s.step,
                                                                s.retired_ns,
                                                                launched_ns,
                                                                0,
                                                                b.graph,
                                                                b.num_rows,
                                                                b.num_tokens,
                                                                b.num_decode_rows,
                                                                s.num_running,
                                                                s.num_waiting,
                                                                s.num_free_blocks,
                                                                s.step_admitted,
                                                                s.step_preempted,
                                                                idle_before,
                                                                a.num_best_effort_rows,
                                                                uint32_t(a.step_class),
                                                                b.segment,
                                                                a.segmented ? s.num_segments : 0,
                                                                a.predicted_ns};
}

// Note what was decided for each row, for tests.
template <class Env>
BLINK_FN void log_step(Env& env, State& s, const StepBuffers& a) {
  const uint32_t entries = s.geometry.log_entries;
  if (entries == 0) return;
  const uint32_t step = uint32_t(s.step), graph = a.header->graph;
  for (uint32_t i = env.lane(); i < a.header->num_rows; i += env.lanes()) {
    const Row& row = a.rows[i];
    const Sequence& q = s.sequences[row.sequence];
    const auto last_block = uint32_t(block_table(s, q.slot)[q.num_blocks - 1]);
    s.log[(s.log_count + i) % entries] = {step,           i,          row.sequence, q.slot, q.num_computed, row.kind,
                                          row.num_tokens, last_block, graph};
  }
  env.sync();
  if (env.lane() == 0) s.log_count += a.header->num_rows;
}

// Count the sequences of a list whose requests are best-effort.
template <class Env>
BLINK_FN uint32_t count_best_effort(Env& env, const State& s, const uint32_t* list, uint32_t count) {
  uint32_t found = 0;
  for (uint32_t i = env.lane(); i < count; i += env.lanes())
    found += s.sequences[list[i]].sqe.service_class == uint32_t(ServiceClass::kBestEffort);
  return env.sum(found);
}

// Copy the counters to the region, where frontends read them.
template <class Env>
BLINK_RARE_FN void publish_statistics(Env& env, State& s) {
  const uint32_t best_effort_running = count_best_effort(env, s, s.running, s.num_running);
  const uint32_t best_effort_waiting = count_best_effort(env, s, s.waiting, s.num_waiting);
  if (env.lane() == 0) {
    Statistics& t = s.statistics;
    t.num_running = s.num_running;
    t.num_waiting = s.num_waiting;
    t.num_running_best_effort = best_effort_running;
    t.num_waiting_best_effort = best_effort_waiting;
    t.num_blocks = s.geometry.num_blocks;
    t.num_blocks_used = s.geometry.num_blocks - available_blocks(s);
    t.num_blocks_cached = s.num_evictable;
    t.num_window_blocks = s.geometry.num_window_blocks;
    t.num_window_blocks_used = s.geometry.num_window_blocks - available_window_blocks(s);
    t.num_window_blocks_cached = s.num_evictable_window_blocks;
    t.num_automata_used = s.num_automata_used;
    t.expired_leases = 0;
    for (uint32_t qp = 0; qp < s.geometry.num_queue_pairs; qp++) t.expired_leases += s.qps[qp].expired;
  }
  env.sync();
  if (env.lane() == 0) s.stats_dirty = 0;  // not before: every lane has to see it set to come here
  const auto* from = reinterpret_cast<const uint64_t*>(&s.statistics);
  auto* to = reinterpret_cast<uint64_t*>(&s.control->statistics);
  for (uint32_t i = env.lane(); i < sizeof(Statistics) / 8; i += env.lanes()) store_relaxed(to[i], from[i]);
  env.sync();
}

// Work that can wait until the launch is in flight.
template <class Env>
BLINK_FN void housekeep(Env& env, State& s, uint64_t launched_ns, bool idle_before) {
  const StepKind kind = kind_in_flight(s);
  const StepBuffers& a = buffers_of(s, kind);
  const bool is_segment = kind == StepKind::kSegmented, is_first = !is_segment || s.segment == 0;
  if (is_first) log_step(env, s, a);
  if (!is_segment || is_last_segment(s)) {
    register_blocks(env, s, a);
    attach_snapshots(env, s, a);
    release_windows(env, s, a);
  }
  if (has_answers(s)) index_answers(env, s);
  if (s.reset_asked) reset_prefix_cache(env, s);
  keep_free(env, s, s.geometry.max_num_seqs);
  if (env.lane() == 0) {
    if (is_first) count_step(s, *a.header);
    trace_launch(s, *a.header, launched_ns, idle_before);
  }
  env.sync();
  publish_events(env, s);
  publish_statistics(env, s);
  prepare_fast_path(env, s);
  prepare_hold(env, s);
}

// Let the next segment of the paused step be what is launched.
template <class Env>
BLINK_RARE_FN void resume(Env& env, State& s) {
  env.sync();
  if (env.lane() == 0) {
    close_account(s);
    BatchHeader& batch = *s.segmented.header;
    batch.step = ++s.step;
    batch.segment = s.segment;
    s.in_flight_kind = uint32_t(StepKind::kSegmented);
    s.step_admitted = s.step_preempted = 0;
    const uint64_t predicted_ns = s.segmented_cost_ns / s.num_segments;
    s.account = Account{0, predicted_ns, 0, batch.graph, s.segmented_best_effort_rows, s.segmented_class, 1};
  }
  env.sync();
}

// Prepare what runs next: a step, or a segment of the paused one. False if there is nothing to do.
template <class Env>
BLINK_RARE_FN bool prepare_launch(Env& env, State& s, uint64_t now) {
  if (is_pausing(s)) {
    if (is_segmented(s)) resume(env, s);
    return is_segmented(s);
  }
  const Choice choice = choose_class(env, s, now);
  if (!choice.resumes && compose(env, s, choice.step_class, now) > 0) return true;
  if (s.failed) return false;
  if (!is_segmented(s)) return choice.step_class != StepClass::kAll && compose(env, s, StepClass::kAll, now) > 0;
  resume(env, s);
  return true;
}

// Launch what is prepared. Runs on: one lane.
template <class Env>
BLINK_FN void launch(Env& env, State& s, StepKind kind) {
  s.in_flight = 1;
  if (has_host(s)) send_copies(s);
  if (!env.launch(s.account.graph, kind == StepKind::kWhole ? kNone : s.segment))
    fail(s, ErrorCode::kLaunchFailed, BLINK_HERE, s.account.graph);
}

struct Glance {
  uint64_t now;
  Outcome outcome;
  uint32_t is_segment;
};

// End with the error of what has failed in flight.
template <class Env>
BLINK_FN StepResult end_failed(Env& env, State& s) {
  env.sync();
  if (env.lane() == 0) {
    const uint32_t failed = output_in_flight(s).failed;
    if (failed >= kFirstLostRank)
      fail(s, ErrorCode::kRankLost, BLINK_HERE, failed - kFirstLostRank);
    else
      fail(s, ErrorCode::kStepFailed, BLINK_HERE, uint32_t(s.step));
  }
  env.sync();
  return StepResult::kFailed;
}

// Run one pass: while a step is in flight, poll; when it is over, retire it, compose the next, launch it and poll.
template <class Env>
BLINK_FN StepResult step(Env& env, State& s) {
  if (!s.booted) boot(env, s);
  if (s.failed) return StepResult::kFailed;
  Glance glance{};
  if (env.lane() == 0) {
    glance.now = env.now();
    stay_awake(s, glance.now);
    glance.outcome = s.in_flight ? env.outcome(output_in_flight(s), s.step) : Outcome::kDone;
    glance.is_segment = kind_in_flight(s) == StepKind::kSegmented;
  }
  glance = env.share(glance);
  const bool was_in_flight = s.in_flight, is_over = glance.outcome != Outcome::kRuns;
  // While a step is in flight the queues are read all the time, so its end is followed by the next launch at once. A
  // segment may be too short for that, and at its end who has come decides.
  if (!was_in_flight || !is_over || glance.is_segment) poll(env, s, glance.now);
  if (s.engine_state == uint32_t(EngineState::kStopped)) return StepResult::kStopped;
  if (!is_over) {
    page_adapters(env, s, glance.now);
    return s.failed ? StepResult::kFailed : StepResult::kBusy;
  }
  if (env.lane() == 0) s.retired_ns = glance.now;
  if (glance.outcome == Outcome::kFailed) return end_failed(env, s);
  const bool may_go_on = was_in_flight && !is_pausing(s) && !expects_hold(s, glance.now);
  const bool is_fast = may_go_on && take_fast_path(env, s);
  if (!is_fast) {
    if (was_in_flight) end_launch(env, s, glance.now);
    reap(env, s, glance.now);
    if (pause_begins(s) && !is_segmented(s)) begin_pause(env, s, glance.now);
    const bool is_held = hold(env, s, glance.now);
    if (!is_held) guess_next_tokens(env, s);
    if (is_held || !prepare_launch(env, s, glance.now)) {
      if (was_in_flight && env.lane() == 0) note_end(s, s.step, glance.now);
      if (s.reset_asked) reset_prefix_cache(env, s);
      publish_events(env, s);
      if (s.stats_dirty) publish_statistics(env, s);
      if (s.failed) return StepResult::kFailed;
      if (is_held) return StepResult::kHeld;
      return is_to_leave(env, s) ? StepResult::kAway : StepResult::kIdle;
    }
  }
  uint64_t launched_ns = 0;
  if (env.lane() == 0) {
    launch(env, s, is_fast ? StepKind::kWhole : kind_in_flight(s));
    launched_ns = env.now();
    if (is_fast) continue_account(s, glance.now);
  }
  env.sync();
  if (s.failed) return StepResult::kFailed;
  if (is_fast) retire_fast_path(env, s, glance.now);
  housekeep(env, s, launched_ns, !was_in_flight);
  poll(env, s, glance.now);
  return StepResult::kLaunched;
}

}  // namespace blink
