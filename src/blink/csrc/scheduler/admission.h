// SPDX-License-Identifier: Apache-2.0
// Chooses the rows of the next step: decode rows first, then prompts in order of rank, while tokens, slots and blocks
// last. There is no prefill or decode phase: num_computed of every sequence catches up with its num_tokens.
#pragma once

#include "scheduler/flow.h"
#include "scheduler/head_drafts.h"
#include "scheduler/host_restore.h"
#include "scheduler/prompt_logprobs.h"
#include "scheduler/share.h"
#include "scheduler/sizing.h"
#include "scheduler/slot.h"

namespace blink {

// What the sequences chosen so far will take, and how many are left to choose (`pending`).
struct StepTotals {
  uint32_t tokens, blocks, pending, context;  // context: tokens of the KV cache that will be read
  uint32_t decode_rows, prefill_rows, best_effort_rows, logprob_rows, larger_rows;
};
BLINK_FN StepTotals operator+(StepTotals a, StepTotals b) {
  return {a.tokens + b.tokens,
          a.blocks + b.blocks,
          a.pending + b.pending,
          a.context + b.context,
          a.decode_rows + b.decode_rows,
          a.prefill_rows + b.prefill_rows,
          a.best_effort_rows + b.best_effort_rows,
          a.logprob_rows + b.logprob_rows,
          a.larger_rows + b.larger_rows};
}

BLINK_FN uint32_t missing_blocks(const State& s, const Sequence& q, uint32_t num_tokens) {
  const uint32_t needed = ceil_div(num_tokens, s.geometry.block_size);
  return needed > q.num_blocks ? needed - q.num_blocks : 0;
}

template <class Env>
BLINK_RARE_FN StepTotals step_totals(Env& env, const State& s) {
  StepTotals t{};
  for (uint32_t i = env.lane(); i < s.num_running; i += env.lanes()) {
    const Sequence& q = s.sequences[s.running[i]];
    t.pending += !is_decoding(q);
    if (!takes_part(q)) continue;
    const uint32_t end = q.num_computed + q.row.num_tokens;
    t.tokens += q.row.num_tokens;
    t.blocks += missing_blocks(s, q, end);
    t.context += read_tokens(q.row, end);
    t.decode_rows += decodes(q.row);
    t.prefill_rows += q.row.kind == RowKind::kPrefill;
    t.best_effort_rows += q.sqe.service_class == uint32_t(ServiceClass::kBestEffort);
    t.logprob_rows += has_prompt_logprobs(q);
    t.larger_rows += q.adapter_slot > 0 || is_guessed_behind(s, q);
  }
  return env.sum(t);
}

// Take a running sequence off the chip: parked with its blocks, or to be recomputed. What takes part in a paused
// step may be parked: its row goes on.
template <class Env>
BLINK_RARE_FN void preempt(Env& env, State& s, uint32_t index, bool keep_blocks, uint64_t now) {
  Sequence& q = s.sequences[index];
  if (!keep_blocks) release_all_blocks(env, s, q);
  env.sync();
  if (env.lane() == 0) {
    q.row = Row{};
    q.skipped_pass = s.pass;
    if (q.status == SequenceStatus::kRunning) {
      q.status = SequenceStatus::kWaiting;
      flow_of(s, q).num_running--;
      q.queued_ns = now;
      s.waiting[s.num_waiting++] = index;
      s.step_preempted++;
      if (keep_blocks)
        s.statistics.num_parked++;
      else
        s.statistics.num_preemptions++, q.preemptions = least(q.preemptions + 1, kMaxToldPreemptions);
    }
    if (!keep_blocks) q.num_blocks = q.num_freed = q.num_computed = q.num_registered = q.state_lag = 0;
    if (!keep_blocks) drop_snapshot(s, q);
  }
  env.sync();
  keep_only(env, s, SequenceStatus::kRunning);
}

// It cannot go on before its frontend reads completions, so others may use its place and its blocks.
BLINK_FN bool is_stalled(const State& s, const Sequence& q) {
  const QueuePairState& pair = s.qps[q.queue_pair];
  const bool waits = q.status == SequenceStatus::kWaiting && cq_room(s, pair) <= completions_per_sample(s, q);
  return !takes_part(q) && (!pair.open || waits);
}

// Whose blocks may be taken besides those of parked and stalled sequences.
enum class Victims { kParked, kYielding, kRunning };

// Whether a running sequence makes way for one that waits: it is stalled, of the lower class, or came later and got
// ahead of one that has waited for too long.
BLINK_FN bool yields(const State& s, const Sequence& running, const Sequence& waiting, uint64_t now) {
  const bool aged = is_aged(s, waiting, now) && !is_aged(s, running, now) && waiting.arrival < running.arrival;
  const bool urgent = !is_best_effort(s, waiting, now) && is_best_effort(s, running, now);
  return is_stalled(s, running) || aged || urgent;
}

// Free the blocks of one sequence that is stalled or ranks behind `rank`: of a parked one first, then of a running one,
// the last in rank first.
template <class Env>
BLINK_RARE_FN bool make_room(Env& env, State& s, Rank rank, Victims victims, uint64_t now) {
  const auto behind = [&](const Sequence& q) {
    const uint32_t index = uint32_t(&q - s.sequences);
    const bool is_free = q.num_blocks > 0 && q.paused_tokens == 0;  // no paused step still writes them
    return is_free && index != rank.sequence && (is_stalled(s, q) || rank < rank_of(s, index, now));
  };
  Rank victim = last_of(env, s, s.waiting, s.num_waiting, now, behind);
  if (victim.sequence == kNone)
    victim = last_of(env, s, s.running, s.num_running, now, [&](const Sequence& q) {
      const bool gives_way = victims == Victims::kYielding && yields(s, q, s.sequences[rank.sequence], now);
      return behind(q) && (victims == Victims::kRunning || gives_way || is_stalled(s, q));
    });
  if (victim.sequence == kNone) return false;
  preempt(env, s, victim.sequence, false, now);
  return true;
}

// Choose every sequence that decodes, and find blocks for all of them.
template <class Env>
BLINK_FN StepTotals choose_decoders(Env& env, State& s, uint64_t now) {
  for (uint32_t i = env.lane(); i < s.num_running; i += env.lanes()) {
    Sequence& q = s.sequences[s.running[i]];
    const bool is_chosen = s.qps[q.queue_pair].open && is_decoding(q) && class_runs(s, q, now);
    set_row(q, is_chosen ? RowKind::kDecode : RowKind::kNone, is_chosen);
  }
  env.sync();
  charge_decoders(env, s);
  StepTotals t = step_totals(env, s);
  while (t.blocks > available_growth(s)) {
    if (!make_room(env, s, kFirstRank, Victims::kRunning, now)) break;
    t = step_totals(env, s);
  }
  return t;
}

// Give a running sequence the next chunk of its prompt, or a longer one, as far as tokens, blocks and its share last.
template <class Env>
BLINK_RARE_FN void extend(Env& env, State& s, Rank rank, StepTotals t, uint64_t now) {
  Sequence& q = s.sequences[rank.sequence];
  if (has_host(s) && !takes_part(q) && restore_prefix(env, s, q, t.blocks, t.decode_rows > 0)) return;
  const uint32_t start = q.num_computed + q.row.num_tokens;
  const Victims victims = takes_part(q) ? Victims::kParked : Victims::kRunning;
  const uint32_t left = s.step_tokens - t.tokens;
  uint32_t chunk = least(q.num_tokens - start, takes_part(q) ? left : least(left, s.prompt_share));
  chunk = least(least(chunk, max_logprob_tokens(s, q)), tokens_to_border(s, q, start));
  uint32_t extra = missing_blocks(s, q, start + chunk);
  while (t.blocks + extra > available_growth(s) && make_room(env, s, rank, victims, now)) t = step_totals(env, s);
  extra = least(extra, available_growth(s) - least(t.blocks, available_growth(s)));
  chunk = least(chunk, (q.num_blocks + extra) * s.geometry.block_size - start);
  if (extra > 0) grow(env, s, q, extra);
  env.sync();
  if (env.lane() == 0) {
    q.num_blocks += extra;
    set_row(q, kind_of_chunk(q.row.num_tokens + chunk), q.row.num_tokens + chunk);
    flow_of(s, q).computed += chunk;
    if (wants_prompt_logprobs(q)) s.qps[q.queue_pair].cq_need += chunk * q.sqe.sampling.num_prompt_logprobs;
    if (chunk == 0) q.skipped_pass = s.pass;
  }
  env.sync();
}

BLINK_FN uint32_t cacheable_blocks(const State& s, const Sequence& q) {
  if (!s.geometry.prefix_caching || q.num_blocks > 0 || wants_prompt_logprobs(q)) return 0;
  return least(q.num_hashed, (q.num_tokens - 1) / s.geometry.block_size);  // one token must be left to compute
}

// Find the longest prefix that a sequence can begin behind. Where the cache holds more of it than that, its states are
// kept this time.
template <class Env>
BLINK_RARE_FN PrefixHit find_usable_prefix(Env& env, State& s, Sequence& q) {
  const PrefixHit hit = find_prefix(env, s, q.slot, cacheable_blocks(s, q));
  if (!(has_snapshots(s) || has_windows(s)) || hit.blocks == 0) return hit;
  const PrefixHit usable = cut_to_usable(env, s, q.slot, hit);
  if (env.lane() == 0) q.split = usable.blocks < hit.blocks ? hit.blocks * s.geometry.block_size : 0;
  env.sync();
  return usable;
}

// Make the sequence run: the prefix that was found is its own, the rest it computes. Runs on: one lane.
BLINK_RARE_FN void start_running(State& s, uint32_t index, PrefixHit hit, uint64_t now) {
  Sequence& q = s.sequences[index];
  const uint32_t found = hit.blocks * s.geometry.block_size, on_host = hit.host_blocks * s.geometry.block_size;
  if (q.num_blocks == 0) {
    q.num_blocks = q.num_registered = hit.blocks;
    q.num_freed = hit.blocks - hit.window_blocks;
    q.num_computed = found;
    const uint32_t last = hit.blocks > 0 ? uint32_t(block_table(s, q.slot)[hit.blocks - 1]) : kNone;
    q.chain = hit.blocks > 0 ? registration_of(s, last) : chain_start(s, q.slot);
    if (hit.blocks > 0 && has_snapshots(s)) begin_with_snapshot(s, q, last);
  }
  if (!q.admitted) {
    q.admitted = 1;
    post(s, q.queue_pair, q.sqe.sequence, CqeKind::kAdmitted, FinishReason::kNone, int32_t(found + on_host), now);
    s.statistics.prompt_tokens += q.sqe.num_prompt_tokens;
    count_lookup(s, q, found);
    if (has_host(s)) s.statistics.host_queries += q.sqe.num_prompt_tokens - found;
  }
  s.qps[q.queue_pair].cq_need += completions_per_sample(s, q);
  q.waited_ns = waited_ns(q, now);
  q.status = SequenceStatus::kRunning;
  flow_of(s, q).num_running++;
  s.running[s.num_running++] = index;
  s.step_admitted++;
}

// Whether the blocks of all of a sequence's tokens can be had besides `taken` ones, and as many window blocks as it has
// at a time.
BLINK_RARE_FN bool has_blocks_for(const State& s, const Sequence& q, PrefixHit hit, uint32_t taken) {
  const uint32_t wanted = missing_blocks(s, q, q.num_tokens) - hit.blocks;
  if (taken + wanted + hit.evictable > available_blocks(s)) return false;
  if (!has_windows(s)) return true;
  const uint32_t windows = missing_windows(s, q, wanted, hit.window_blocks);
  return taken + windows + hit.evictable_windows <= available_window_blocks(s);
}

// Let the first waiting sequence run, if a place and blocks for all of its tokens can be had.
template <class Env>
BLINK_RARE_FN bool admit(Env& env, State& s, Rank rank, StepTotals t, uint64_t now) {
  Sequence& q = s.sequences[rank.sequence];
  if (s.num_running == s.geometry.max_num_seqs) {
    const Rank victim =
        last_of(env, s, s.running, s.num_running, now, [&](const Sequence& v) { return yields(s, v, q, now); });
    if (victim.sequence == kNone) return false;
    preempt(env, s, victim.sequence, true, now);
    t = step_totals(env, s);
  }
  if (!take_slot(env, s, rank.sequence, now)) return false;
  if (q.status == SequenceStatus::kFree) return true;  // its data was bad
  PrefixHit hit;
  for (;;) {
    hit = find_usable_prefix(env, s, q);
    if (has_blocks_for(s, q, hit, t.blocks)) break;
    if (!make_room(env, s, rank, Victims::kYielding, now)) return false;
    t = step_totals(env, s);
  }
  acquire_prefix(env, s, q.slot, hit);
  if (env.lane() == 0 && has_host(s)) hit.host_blocks = count_restorable(s, q, hit.blocks);
  if (env.lane() == 0) start_running(s, rank.sequence, hit, now);
  env.sync();
  keep_only(env, s, SequenceStatus::kWaiting);
  extend(env, s, rank, t, now);
  return true;
}

// Whether a waiting sequence could run, if what it reads of the model's memory were there.
BLINK_RARE_FN bool may_be_next(const State& s, const Sequence& q, uint64_t now) {
  // Without a slot it would only keep those from running that have one.
  return s.pause_mode != PauseMode::kWait && q.skipped_pass != s.pass && can_start(s, q) &&
         (q.slot != kNone || s.qps[q.queue_pair].may_take) && class_runs(s, q, now) && has_automaton_room(s, q);
}

BLINK_FN bool can_admit(const State& s, const Sequence& q, uint64_t now) {
  return may_be_next(s, q, now) && !lacks_adapter(s, q);
}

// Whether the rest of a running sequence's prompt waits for a chunk of the step that is being composed.
BLINK_RARE_FN bool wants_chunk(const State& s, const Sequence& q, uint64_t now) {
  return q.status == SequenceStatus::kRunning && !takes_part(q) && !is_decoding(q) && s.qps[q.queue_pair].open &&
         q.skipped_pass != s.pass && class_runs(s, q, now);
}

// Whether a sequence of either list waits for prompt tokens of the step that is being composed.
BLINK_FN bool wants_prompt_tokens(const State& s, const Sequence& q, uint64_t now) {
  return q.status == SequenceStatus::kWaiting ? can_admit(s, q, now) : wants_chunk(s, q, now);
}

// Decide how many tokens the step takes, from who decodes in it (`t`) and the prompts that wait. While urgent
// sequences decode, best-effort prompts do not make it longer than its target.
template <class Env>
BLINK_RARE_FN void set_step_tokens(Env& env, State& s, StepTotals t, uint64_t now) {
  uint32_t waiting = 0;
  const bool is_urgent = t.decode_rows > t.best_effort_rows || is_decode_preempted(s);
  if (has_costs(s) && (t.tokens > 0 || is_decode_preempted(s))) {
    for (uint32_t i = env.lane(); i < s.num_running + s.num_waiting; i += env.lanes()) {
      const Sequence& q = s.sequences[i < s.num_running ? s.running[i] : s.waiting[i - s.num_running]];
      const bool counts = !is_urgent || !is_best_effort(s, q, now);
      if (counts && wants_prompt_tokens(s, q, now)) waiting += q.num_tokens - q.num_computed;
    }
    waiting = env.sum(waiting);
  }
  if (env.lane() == 0) s.step_tokens = size_step(s, t.tokens, t.context, waiting, is_urgent);
  env.sync();
}

// Give what other flows have left of the step's tokens to prompts whose share was too small for them.
template <class Env>
BLINK_RARE_FN StepTotals use_leftovers(Env& env, State& s, StepTotals t, uint64_t now) {
  while (!s.failed && s.prompt_share != kNone && t.tokens < s.step_tokens) {
    const Rank next = first_of(env, s, s.running, s.num_running, now, [&](const Sequence& q) {
      return takes_part(q) && q.row.num_samples == 0 && q.skipped_pass != s.pass;
    });
    if (next.sequence == kNone) break;
    extend(env, s, next, t, now);
    t = step_totals(env, s);
  }
  return t;
}

// Choose prompts, in order of rank over running and waiting sequences alike, until the step's tokens are spent. Returns
// what all chosen sequences take.
template <class Env>
BLINK_FN StepTotals choose_prompts(Env& env, State& s, StepTotals t, uint64_t now) {
  if (t.pending == 0 && s.num_waiting == 0) return t;
  bool admitting = true;
  share_slots(env, s);
  set_step_tokens(env, s, t, now);
  share_prompt_tokens(env, s, t.tokens, [&](const Sequence& q) { return wants_prompt_tokens(s, q, now); });
  while (!s.failed && t.tokens < s.step_tokens && (t.pending > 0 || s.num_waiting > 0)) {
    Rank next =
        first_of(env, s, s.running, s.num_running, now, [&](const Sequence& q) { return wants_chunk(s, q, now); });
    const Rank running = next;
    if (admitting)
      next = least(next, first_of(env, s, s.waiting, s.num_waiting, now,
                                  [&](const Sequence& q) { return can_admit(s, q, now); }));
    if (next.sequence == kNone) break;
    if (next.sequence == running.sequence)
      extend(env, s, next, t, now);
    else
      admitting = admit(env, s, next, t, now);
    if (next.sequence != running.sequence) offer_slots(env, s);
    t = step_totals(env, s);
  }
  return use_leftovers(env, s, t, now);
}

}  // namespace blink
