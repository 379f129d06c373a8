// SPDX-License-Identifier: Apache-2.0
// Fast path: the same rows decode one token further. It is taken while no row ends and no sequence waits.
//
// The next batch is prepared while a step runs; only the sampled tokens are filled in between. The last step is retired
// after the next launch. The decisions are those of retire() and compose(), only sooner.
#pragma once

#include "scheduler/compose.h"
#include "scheduler/retire.h"

namespace blink {

// The window block of a row's next token: the one that it has, or a free one, where it starts a block.
BLINK_FN uint32_t next_window_block(const State& s, const NextRow& next, uint32_t rank) {
  if (next.block == kNone) return uint32_t(s.window_tables[next.table_place]);
  return rank < s.num_free_window_blocks ? s.free_window_blocks[s.num_free_window_blocks - 1 - rank] : kNone;
}

// Note what each row of the step in flight needs to go on, and whether all could.
template <class Env>
BLINK_FN void prepare_fast_path(Env& env, State& s) {
  const Geometry& g = s.geometry;
  const uint32_t rows = s.whole.header->num_rows;
  const bool is_alone = kind_in_flight(s) == StepKind::kWhole && !is_segmented(s);
  const bool has_prompts = rows != s.whole.header->num_decode_rows || is_pooling(g);
  uint32_t stuck = !is_alone || rows != s.num_running || has_prompts || has_siblings(s), taken = 0, guesses = 0;
  for (uint32_t tile = 0; tile < rows && !stuck; tile += env.lanes()) {
    const uint32_t row = tile + env.lane();
    const Row& before = s.whole.rows[row < rows ? row : 0];
    const Sequence& q = s.sequences[before.sequence];
    const uint32_t position = q.num_computed + 1;  // of the token that is being sampled
    const bool grows = row < rows && missing_blocks(s, q, position + 1) > 0;
    const bool samples = before.num_samples == 1 && completions_per_sample(s, q) == 1;
    const bool is_last = q.num_generated + 1 >= q.sqe.max_tokens || position + 1 >= g.max_model_len;
    uint32_t num_grown = 0, num_stuck = 0;
    const uint32_t rank = taken + env.scan(grows, num_grown);
    // What compose() decides on: whether what the next row leaves is kept, and which siblings the row has.
    const Foresight foresight = foresee(s, q);
    const bool is_open = is_border(s, q, position + 1) || foresight.is_open;
    env.scan(row < rows && (!samples || is_last || is_open), num_stuck);
    taken += num_grown;
    stuck += num_stuck;
    if (row >= rows) continue;
    NextRow& next = s.next_rows[row];
    next.token_place = uint64_t(q.slot) * g.max_model_len + position;
    next.table_place = uint64_t(q.slot) * g.max_blocks + position / g.block_size;
    next.position = int32_t(position);
    next.looks_up = foresight.looks_up;
    next.guesses = foresight.guesses;
    guesses += next.guesses;
    if (speculates(s)) index_text(env, s, s.sequences[before.sequence], position);
    if (is_guessed(s, q)) read_spacing(s, s.sequences[before.sequence], position);
    next.block = grows && rank < s.num_free_blocks ? s.free_blocks[s.num_free_blocks - 1 - rank] : kNone;
    if (has_windows(s)) next.window_block = next_window_block(s, next, rank);
    const int32_t block = grows ? int32_t(next.block) : s.block_tables[next.table_place];
    next.kv_slot = block * int32_t(g.block_size) + int32_t(position % g.block_size);
    next.stops_at = q.slot * kMaxStopTokens;
    next.num_stops = q.num_generated + 1 > q.sqe.sampling.min_tokens ? q.sqe.num_stop_tokens : 0;
    for (uint32_t i = 0; i < kPreparedStopTokens; i++)
      next.stops[i] = i < next.num_stops ? s.stop_tokens[next.stops_at + i] : kInvalidLogits;
  }
  guesses = env.sum(guesses);
  if (env.lane() == 0) {
    s.fast_path_ready = !stuck;
    s.next_guesses = guesses;
    s.next_blocks = taken;
  }
  env.sync();
}

// Whether a row's text has stood elsewhere with the token that was sampled, which is written behind it.
BLINK_FN bool has_source(const State& s, uint32_t row, const NextRow& next) {
  s.tokens[next.token_place] = next.token;
  const Sequence& q = s.sequences[s.whole.rows[row].sequence];
  return find_source(s, q, uint32_t(next.position) + 1, next.looks_up) != kNone;
}

// Whether the row's sampled token lets it go on; keeps what was sampled.
BLINK_FN bool decode_continues(State& s, uint32_t row) {
  NextRow& next = s.next_rows[row];
  const int32_t token = s.whole.sampled_tokens[row];
  const float logprob = s.whole.sampled_logprobs[row];  // on its way beside the token
  bool ends = token < 0 || uint32_t(token) >= s.geometry.vocab_size;
  for (const int32_t stop : next.stops) ends |= token == stop;
  for (uint32_t i = kPreparedStopTokens; i < next.num_stops; i++) ends |= s.stop_tokens[next.stops_at + i] == token;
  next.token = token;
  next.logprob = logprob;
  return !ends && !(next.looks_up && has_source(s, row, next));
}

// Whether an automaton leaves no choice behind a row's sampled token.
template <class Env>
BLINK_RARE_FN bool has_guesses(Env& env, const State& s) {
  bool found = false;
  for (uint32_t row = env.lane(); row < s.num_running; row += env.lanes()) {
    const NextRow& next = s.next_rows[row];
    const Sequence& q = s.sequences[s.whole.rows[row].sequence];
    found |= next.guesses && has_guess(s, q, q.num_generated + 1, next.token);
  }
  return env.any(found);
}

// Whether the queue pair's sequences may run, and its completions of two steps have room.
BLINK_FN bool is_open(const State& s, const QueuePairState& pair) {
  return (!pair.closing || pair.num_live == 0) && cq_room(s, pair) >= pair.cq_need;
}

// Move a row of the batch on by one token.
BLINK_FN void write_next_row(State& s, uint32_t row) {
  const NextRow next = s.next_rows[row];
  if (next.block != kNone) s.block_tables[next.table_place] = int32_t(next.block);
  s.tokens[next.token_place] = next.token;
  s.whole.input_ids[row] = next.token;
  s.whole.positions[row] = next.position;
  s.whole.kv_slots[row] = next.kv_slot;
  s.whole.context_lens[row] = next.position + 1;
  if (has_windows(s)) {
    const uint32_t size = s.geometry.block_size;
    s.window_tables[next.table_place] = int32_t(next.window_block);
    s.whole.window_kv_slots[row] = int32_t(next.window_block * size + uint32_t(next.position) % size);
  }
  s.whole.state_sources[row] = s.whole.state_targets[row] = s.whole.state_lags[row] = 0;
}

// Write the next batch from the step that has ended, which is not retired; false if compose() has to decide. The blocks
// are still those that were free: nothing takes or gives any while a step runs.
template <class Env>
BLINK_FN bool take_fast_path(Env& env, State& s) {
  if (!s.fast_path_ready || s.num_waiting + s.num_cancels > 0 || s.next_blocks > s.num_free_blocks) return false;
  if (has_windows(s) && s.next_blocks > s.num_free_window_blocks) return false;
  const uint32_t rows = s.num_running;
  bool is_blocked = false;
  for (uint32_t row = env.lane(); row < rows; row += env.lanes()) is_blocked |= !decode_continues(s, row);
  for (uint32_t qp = env.lane(); qp < s.geometry.num_queue_pairs; qp += env.lanes())
    is_blocked |= !is_open(s, s.qps[qp]);
  if (env.any(is_blocked) || (s.next_guesses && has_guesses(env, s))) return false;
  for (uint32_t row = env.lane(); row < rows; row += env.lanes()) write_next_row(s, row);
  if (env.lane() == 0) {
    s.pass++;
    s.step_admitted = s.step_preempted = 0;
    s.whole.header->step = ++s.step;
  }
  env.sync();
  return true;
}

// Go on with the account of the step in flight, whose rows each read one token more. Runs on: one lane.
BLINK_FN void continue_account(State& s, uint64_t now) {
  end_account(s, now);
  close_account(s);
  s.urgent_ns = now;
  s.account.kv_tokens += s.num_running;
  s.account.predicted_ns = predict_ns(s, s.account.graph, s.account.kv_tokens);
}

// Retire the step before the one that take_fast_path() wrote: deliver its tokens. Every row has the same share of
// completions in this step as in that one, so each queue pair's need of room stays.
template <class Env>
BLINK_FN void retire_fast_path(Env& env, State& s, uint64_t now) {
  const uint32_t rows = s.num_running;
  for (uint32_t row = env.lane(); row < rows; row += env.lanes()) {
    const NextRow& next = s.next_rows[row];
    Sequence& q = s.sequences[s.whole.rows[row].sequence];
    if (next.block != kNone) {
      s.ref_counts[next.block] = 1;
      if (has_windows(s)) s.window_refs[next.window_block] = 1;
      q.num_blocks++;
    }
    q.num_computed++;
    q.num_tokens++;
    q.num_generated++;
    const uint32_t at = env.fetch_add(s.qps[q.queue_pair].cq_tail, 1);
    post_token(s, at, q, next.token, next.logprob, 0, now);
    note_delivery(s, q, 1, now);
  }
  env.sync();
  if (env.lane() == 0) {
    s.num_free_blocks -= s.next_blocks;
    if (has_windows(s)) s.num_free_window_blocks -= s.next_blocks;
    s.num_fast_steps++;
    s.statistics.generation_tokens += rows;
  }
  env.sync();
  charge_decoders(env, s);
  raise_floor(env, s);
}

}  // namespace blink
