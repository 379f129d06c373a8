// SPDX-License-Identifier: Apache-2.0
// The invariants of the scheduler's state, checked from scratch. Host only; tests call it after every step.
#pragma once

#include <vector>

#include "scheduler/adapter_integrity.h"
#include "scheduler/answers_integrity.h"
#include "scheduler/draft_integrity.h"
#include "scheduler/event_integrity.h"
#include "scheduler/host_integrity.h"
#include "scheduler/scheduler.h"
#include "scheduler/window_integrity.h"

namespace blink {

class IntegrityCheck {
 public:
  explicit IntegrityCheck(const State& state) : s_(state), refs_(state.geometry.num_blocks) {}

  const char* run() {
    const char* broken = nullptr;
    for (auto check : {&IntegrityCheck::lists, &IntegrityCheck::slots, &IntegrityCheck::tables, &IntegrityCheck::blocks,
                       &IntegrityCheck::prefix_cache, &IntegrityCheck::queue_pairs, &IntegrityCheck::automata,
                       &IntegrityCheck::rows, &IntegrityCheck::paused, &IntegrityCheck::snapshots})
      if (!broken) broken = (this->*check)();
    if (!broken) broken = check_windows(s_);
    if (!broken) broken = check_adapters(s_);
    if (!broken) broken = check_events(s_);
    if (!broken) broken = check_answers(s_);
    return broken ? broken : check_host_tier(s_);
  }

 private:
  uint32_t num_sequences() const { return s_.geometry.num_queue_pairs * s_.geometry.sequences_per_queue_pair; }

  const char* lists() {
    uint32_t running = 0, waiting = 0, paced = 0;
    for (uint32_t i = 0; i < num_sequences(); i++) {
      paced += s_.sequences[i].status != SequenceStatus::kFree && tpot_target_ns(s_, s_.sequences[i]) > 0;
      running += s_.sequences[i].status == SequenceStatus::kRunning;
      waiting += s_.sequences[i].status == SequenceStatus::kWaiting;
    }
    if (running != s_.num_running || waiting != s_.num_waiting)
      return "a list and the statuses disagree on their number";
    if (paced != s_.num_paced) return "the number of sequences with a target is wrong";
    if (running > s_.geometry.max_num_seqs) return "more sequences run than max_num_seqs";
    std::vector<bool> seen(num_sequences());
    for (uint32_t i = 0; i < running + waiting; i++) {
      const uint32_t index = i < running ? s_.running[i] : s_.waiting[i - running];
      const auto status = i < running ? SequenceStatus::kRunning : SequenceStatus::kWaiting;
      if (seen[index] || s_.sequences[index].status != status) return "a sequence stands twice or in the wrong list";
      seen[index] = true;
    }
    return nullptr;
  }

  const char* slots() {
    std::vector<bool> seen(s_.geometry.num_slots);
    uint32_t used = 0;
    for (uint32_t i = 0; i < num_sequences(); i++) {
      const Sequence& q = s_.sequences[i];
      if (q.status == SequenceStatus::kFree || q.slot == kNone) {
        if (q.status == SequenceStatus::kRunning) return "a running sequence has no slot";
        continue;
      }
      if (seen[q.slot]) return "two sequences share a slot";
      seen[q.slot] = true;
      used++;
    }
    for (uint32_t i = 0; i < s_.num_free_slots; i++) {
      if (seen[s_.free_slots[i]]) return "a free slot is used or free twice";
      seen[s_.free_slots[i]] = true;
    }
    return used + s_.num_free_slots == s_.geometry.num_slots ? nullptr : "a slot leaked";
  }

  const char* tables() {
    for (uint32_t i = 0; i < num_sequences(); i++) {
      const Sequence& q = s_.sequences[i];
      if (q.status == SequenceStatus::kFree) continue;
      if (q.num_computed > q.num_tokens) return "more tokens are computed than exist";
      const uint32_t computed = computed_tokens(q);
      if (computed > q.num_blocks * s_.geometry.block_size) return "computed tokens have no block";
      for (uint32_t b = 0; b < q.num_blocks; b++) {
        const uint32_t block = uint32_t(block_table(s_, q.slot)[b]);
        if (block >= s_.geometry.num_blocks) return "a block table holds no block";
        refs_[block]++;
        // A block that is still being written must not be shared.
        if ((b + 1) * s_.geometry.block_size > computed && s_.ref_counts[block] != 1)
          return "an unfinished block is shared";
      }
    }
    return nullptr;
  }

  const char* blocks() {
    std::vector<bool> free(s_.geometry.num_blocks);
    for (uint32_t i = 0; i < s_.num_free_blocks; i++) {
      const uint32_t block = s_.free_blocks[i];
      if (free[block]) return "a block is free twice";
      free[block] = true;
    }
    uint32_t cached = 0;
    for (uint32_t b = 0; b < s_.geometry.num_blocks; b++) {
      if (refs_[b] != s_.ref_counts[b]) return "a reference count is wrong";
      if (free[b] && (refs_[b] > 0 || s_.block_hashed[b])) return "a free block is used or cached";
      if (!free[b] && refs_[b] == 0 && !s_.block_hashed[b]) return "a block leaked";
      cached += refs_[b] == 0 && s_.block_hashed[b];
    }
    if (cached != s_.num_evictable) return "the number of evictable blocks is wrong";
    uint32_t live = 0;
    for (uint32_t i = 0; i < s_.lru_count; i++)
      live += lru_live<FullPool>(s_, s_.lru[(s_.lru_head + i) & (s_.geometry.lru_entries - 1)]);
    return live == cached ? nullptr : "the LRU queue misses a cached block";
  }

  const char* prefix_cache() {
    uint32_t entries = 0, hashed = 0;
    for (uint32_t i = 0; i < s_.geometry.hash_entries; i++) {
      if (s_.hash_table[i] == 0) continue;
      entries++;
      if (hash_find(s_, s_.block_hashes[s_.hash_table[i] - 1]) != i) return "a hash entry cannot be found";
    }
    for (uint32_t b = 0; b < s_.geometry.num_blocks; b++) hashed += s_.block_hashed[b] != 0;
    return entries == hashed ? parents() : "the hash table and the blocks disagree";
  }

  // Each chain of registered blocks ends at a prompt's start or where a parent is gone; and what a sequence reads from
  // a registered block are its own tokens.
  const char* parents() {
    for (uint32_t b = 0; b < s_.geometry.num_blocks; b++) {
      if (!s_.block_hashed[b]) continue;
      uint32_t at = b, length = 0;
      while (s_.block_parents[at].block != kNone) {
        const Registration parent = s_.block_parents[at];
        if (parent.block >= s_.geometry.num_blocks || parent.count > s_.block_registrations[parent.block])
          return "a block's parent was never registered";
        const uint32_t before = holder_of(parent);
        if (before == kNone) break;
        at = before;
        if (++length > s_.geometry.num_blocks) return "blocks are each other's parents";
      }
    }
    for (uint32_t i = 0; i < num_sequences(); i++) {
      const Sequence& q = s_.sequences[i];
      if (q.status == SequenceStatus::kFree) continue;
      const int32_t* tokens = s_.tokens + uint64_t(q.slot) * s_.geometry.max_model_len;
      for (uint32_t at = 0; at < q.num_blocks * s_.geometry.block_size; at++) {
        const uint32_t block = uint32_t(block_table(s_, q.slot)[at / s_.geometry.block_size]);
        if (s_.block_hashed[block] && block_tokens(s_, block)[at % s_.geometry.block_size] != tokens[at])
          return "a sequence reads a cached block of other tokens";
      }
    }
    return nullptr;
  }

  // The registered block that has a registration: its own, unless it was restored from host memory.
  uint32_t holder_of(Registration id) const {
    const auto holds = [&](uint32_t block) { return s_.block_hashed[block] && registration_of(s_, block) == id; };
    if (holds(id.block)) return id.block;
    for (uint32_t block = 0; has_host(s_) && block < s_.geometry.num_blocks; block++)
      if (holds(block)) return block;
    return kNone;
  }

  const char* queue_pairs() {
    std::vector<uint32_t> live(s_.geometry.num_queue_pairs), slots(s_.geometry.num_queue_pairs);
    uint32_t cancels = 0;
    for (uint32_t i = 0; i < num_sequences(); i++) {
      const Sequence& q = s_.sequences[i];
      if (q.status == SequenceStatus::kFree) continue;
      live[i / s_.geometry.sequences_per_queue_pair]++;
      slots[i / s_.geometry.sequences_per_queue_pair] += q.slot != kNone;
      cancels += q.cancelled;
      if (q.queue_pair != i / s_.geometry.sequences_per_queue_pair) return "a sequence belongs to another queue pair";
    }
    uint32_t total = 0;
    for (uint32_t qp = 0; qp < s_.geometry.num_queue_pairs; qp++) {
      if (live[qp] != s_.qps[qp].num_live) return "a queue pair miscounts its sequences";
      if (slots[qp] != s_.qps[qp].num_slots) return "a queue pair miscounts its slots";
      total += live[qp];
    }
    if (const char* broken = flows()) return broken;
    if (total != s_.num_live) return "the live sequences are miscounted";
    return cancels == s_.num_cancels ? nullptr : "the cancellations are miscounted";
  }

  // The rows of the launch in flight are of the kind that their place and their tokens say, and sample where they end.
  const char* rows() {
    const StepBuffers& a = buffers_of(s_, kind_in_flight(s_));
    for (uint32_t i = 0; s_.in_flight && i < a.header->num_rows; i++) {
      const Row& row = a.rows[i];
      const Sequence& q = s_.sequences[row.sequence];
      if (row.kind == RowKind::kVerify) {
        if (const char* broken = check_verify_row(s_, a, i, q)) return broken;
        i += row.num_tokens - 1;
        continue;
      }
      if ((row.kind == RowKind::kDecode) != (i < a.header->num_decode_rows)) return "a row stands among another kind";
      if (row.kind != kind_of_chunk(row.num_tokens)) return "a row is not of its kind's size";
      if (int32_t(row.first_token) != a.query_starts[i] || row.num_tokens + row.first_token != token_end(a, i))
        return "a row and the batch disagree on its tokens";
      if (row.num_samples != (q.num_computed + row.num_tokens == q.num_tokens)) return "a row samples elsewhere";
    }
    return nullptr;
  }
  static uint32_t token_end(const StepBuffers& a, uint32_t row) { return uint32_t(a.query_starts[row + 1]); }

  // The rows of the step that is launched in segments are its sequences, each with its slot, its blocks and its row.
  const char* paused() {
    std::vector<bool> has_row(num_sequences());
    const StepBuffers& a = s_.segmented;
    if (is_segmented(s_) && s_.segment >= s_.num_segments) return "a paused step has no segment left";
    for (uint32_t row = 0; is_segmented(s_) && row < a.header->num_rows; row++) {
      const Sequence& q = s_.sequences[a.rows[row].sequence];
      const uint32_t tokens = a.rows[row].num_tokens;
      if (q.status == SequenceStatus::kFree || int32_t(q.slot) != a.row_slots[row])
        return "a paused row has lost its sequence";
      if (q.paused_tokens != tokens || q.num_computed + tokens != uint32_t(a.context_lens[row]))
        return "a sequence moved on under its paused row";
      has_row[a.rows[row].sequence] = true;
    }
    uint32_t best_effort = 0;
    for (uint32_t i = 0; i < num_sequences(); i++) {
      const Sequence& q = s_.sequences[i];
      if (q.status == SequenceStatus::kFree) continue;
      best_effort += q.sqe.service_class == uint32_t(ServiceClass::kBestEffort);
      if ((q.paused_tokens > 0) != has_row[i]) return "a sequence is paused without a row";
      if (q.paused_tokens > 0 && takes_part(q)) return "a sequence is in two steps";
    }
    for (uint32_t qp = 0; qp < s_.geometry.num_queue_pairs; qp++)
      if (!is_segmented(s_) && s_.qps[qp].cq_held > 0) return "completions are held for no step";
    return best_effort == s_.num_best_effort ? nullptr : "the best-effort sequences are miscounted";
  }

  // A snapshot is of the block that says so, or free, or nobody's: then a step writes it or a sequence waits for it.
  const char* snapshots() {
    std::vector<uint32_t> readers(s_.geometry.num_snapshots), writers(readers.size());
    for (uint32_t i = 0; i < num_sequences(); i++)
      if (s_.sequences[i].status != SequenceStatus::kFree && s_.sequences[i].snapshot > 0)
        readers[s_.sequences[i].snapshot - 1]++;
    for (uint32_t row = 0; is_segmented(s_) && row < s_.segmented.header->num_rows; row++)
      if (s_.segmented.state_targets[row] > 0) writers[s_.segmented.state_targets[row] - 1]++;
    for (uint32_t i = 0; i < readers.size(); i++) {
      const uint32_t block = s_.snapshot_blocks[i];
      if (readers[i] != s_.snapshot_readers[i]) return "a snapshot miscounts its readers";
      if (writers[i] > 1) return "two rows write a snapshot";
      if (block == 0 && readers[i] > 0) return "a free snapshot is in use";
      if (block == kNone && readers[i] + writers[i] == 0) return "a snapshot leaked";
      if (block != 0 && block != kNone && s_.block_snapshots[block - 1] != i + 1)
        return "a snapshot's block has another";
    }
    for (uint32_t b = 0; b < s_.geometry.num_blocks; b++) {
      const uint32_t snapshot = s_.block_snapshots[b];
      if (snapshot == 0) continue;
      if (!s_.block_hashed[b]) return "states are kept of a block that nobody finds";
      if (s_.snapshot_blocks[snapshot - 1] != b + 1) return "a block's snapshot is another's";
    }
    return nullptr;
  }

  const char* automata() {
    std::vector<uint32_t> users(s_.geometry.num_automata), own(users.size());
    for (uint32_t i = 0; i < num_sequences(); i++) {
      const Sequence& q = s_.sequences[i];
      if (q.status == SequenceStatus::kFree || q.slot == kNone) continue;
      if ((q.sqe.automaton_bytes > 0) != (q.automaton != kNone)) return "a sequence with a slot has lost its automaton";
      if (s_.params[q.slot].automaton != q.automaton + 1) return "a slot names another automaton";
      if (q.automaton == kNone) continue;
      if (q.automaton >= users.size()) return "a sequence has no such automaton";
      if (s_.automaton_entries[q.automaton].queue_pair != q.queue_pair) return "a sequence has a foreign automaton";
      users[q.automaton]++;
      own[q.automaton] += s_.automaton_entries[q.automaton].flow == flow_index(q);
    }
    uint32_t used = 0;
    std::vector<uint32_t> places(s_.geometry.num_queue_pairs * kFlows);
    for (uint32_t i = 0; i < users.size(); i++) {
      const AutomatonEntry& entry = s_.automaton_entries[i];
      if (entry.num_users != users[i]) return "an automaton's users are miscounted";
      if (entry.num_own != own[i]) return "an automaton miscounts the users whose place it takes";
      if (users[i] == 0) continue;
      if (own[i] == 0) return "an automaton takes the place of a flow that does not use it";
      places[entry.flow]++;
      used++;
    }
    for (uint32_t i = 0; i < places.size(); i++)
      if (s_.flows[i].num_automata != places[i]) return "a flow's automata are miscounted";
    return s_.num_automata_used == used ? nullptr : "the used automata are miscounted";
  }

  const char* flows() {
    std::vector<uint32_t> live(s_.geometry.num_queue_pairs * kFlows), running(live.size());
    for (uint32_t i = 0; i < num_sequences(); i++) {
      const SequenceStatus status = s_.sequences[i].status;
      if (status != SequenceStatus::kFree) live[&flow_of(s_, s_.sequences[i]) - s_.flows]++;
      if (status == SequenceStatus::kRunning) running[&flow_of(s_, s_.sequences[i]) - s_.flows]++;
    }
    uint32_t active = 0;
    for (uint32_t i = 0; i < live.size(); i++) {
      active += live[i] > 0;
      if (s_.flows[i].num_live != live[i]) return "a flow miscounts its sequences";
      if (s_.flows[i].num_running != running[i]) return "a flow miscounts its running sequences";
      if (s_.flows[i].pending != 0) return "a flow was left half counted";
    }
    return s_.num_flows == active ? nullptr : "the flows are miscounted";
  }

  const State& s_;
  std::vector<uint32_t> refs_;
};

inline const char* check_integrity(const State& state) { return IntegrityCheck(state).run(); }

}  // namespace blink
