// SPDX-License-Identifier: Apache-2.0
// The scheduler's own memory (GPU memory, or the heap of the CPU engine): sequences, KV blocks and the batch.
// Everything is written by the scheduler but the model's results. state_arrays.h lays the arrays out.
#pragma once

#include "scheduler/adapter_use.h"
#include "scheduler/event_state.h"
#include "scheduler/graph_cost.h"
#include "scheduler/host_tier_state.h"
#include "scheduler/sequence.h"
#include "scheduler/step_buffers.h"

namespace blink {

constexpr uint32_t kPollBatch = 16;     // SQEs of one queue pair in one pass: a pass stays bounded
constexpr int32_t kInvalidLogits = -1;  // sampled of a row that has no finite logit left, or a NaN
constexpr int32_t kGrammarDone = -2;    // sampled of a row whose grammar is complete: the sequence finishes with "stop"

// The sequence of one of a step's rows; kNone of those that verify drafts, which the row before them describes.
BLINK_FN uint32_t described_sequence(const StepBuffers& a, uint32_t row) {
  return a.rows[row].kind == RowKind::kNone ? kNone : a.rows[row].sequence;
}

// What the model's kernels read of a slot besides its tables, by columns of one word.
struct SlotParams {
  FIELDS_OF(SlotParams);
  FIELD(Sampling, sampling);
  FIELD(uint32_t, num_prompt_tokens);
  FIELD(uint32_t, num_stop_tokens);
  FIELD(uint32_t, num_biases);
  FIELD(uint32_t, automaton);  // index + 1 of the one that constrains the text; 0: none does
  FIELD(uint32_t, adapter);    // Sequence::adapter_slot
  FIELD(uint32_t, content);    // AdapterUse::content; 0: no adapter
};
static_assert(sizeof(SlotParams) == 88, "a slot's parameters are 22 words");

// What the model's draft head has written behind a slot's text, in the step that sampled its newest token. writer: the
// model, but for the rest.
struct HeadDraft {
  FIELDS_OF(HeadDraft);
  FIELD(uint32_t, rests_until);  // tokens of the text before which no draft is taken; writer: scheduler
  FIELD(uint32_t, num_tokens);   // of the text then; 0: there is no draft
  FIELD(uint32_t, count);        // tokens of the draft
  FIELD_ARRAY(int32_t, tokens, kMaxDrafts);
};

// An automaton that the engine holds: of one owner of a queue pair, under the name that he gave it.
struct AutomatonEntry {
  FIELDS_OF(AutomatonEntry);
  FIELD(uint32_t, queue_pair);
  FIELD(uint32_t, owner);      // generation of the queue pair; 0: the entry is empty
  FIELD(uint32_t, num_users);  // slots
  FIELD(uint32_t, flow);       // whose place it takes: of its users'
  FIELD(uint32_t, num_own);    // users of that flow; 0: it is not in use
  FIELD(uint32_t, stamp);      // when it was last taken
  FIELD_ARRAY(uint8_t, hash, kAutomatonHashBytes);
};

// A token, by the hash of its bytes (token_index.h).
struct TokenEntry {
  FIELDS_OF(TokenEntry);
  FIELD(uint32_t, hash);
  FIELD(uint32_t, token);  // + 1; 0: the entry is empty
};

// A token of the ring of recent answers (answers.h). All 0: behind the last one of an answer, and where none was
// written.
struct AnswerToken {
  FIELDS_OF(AnswerToken);
  FIELD(uint64_t, scope);  // Drafting::scope of its sequence
  FIELD(int32_t, token);
  FIELD(uint32_t, answer);  // its number, from 1 on
};

struct LruEntry {
  uint32_t block, stamp;
};

// What the sequences of one flow have cost so far.
struct Flow {
  FIELDS_OF(Flow);
  FIELD(uint64_t, computed);  // tokens computed for it, but never less than others had when it came back
  FIELD(uint32_t, num_live);
  FIELD(uint32_t, num_running);
  FIELD(uint32_t, num_automata);  // entries whose place is its own
  FIELD(uint32_t, pending);       // scratch of one phase of a step
};

// The scheduler's side of one queue pair.
struct QueuePairState {
  FIELDS_OF(QueuePairState);
  FIELD(uint32_t, sq_head);
  FIELD(uint32_t, sq_tail);
  FIELD(uint32_t, cq_head);
  FIELD(uint32_t, cq_tail);
  FIELD(uint32_t, attached);     // generation; 0 = nobody
  FIELD(uint32_t, attaching);    // generation that waits for the old sequences to end
  FIELD(uint32_t, last_attach);  // generation seen last in the frontend's word
  FIELD(uint32_t, expired);      // leases lost
  FIELD(uint32_t, lease);
  FIELD(uint32_t, closing);        // end all its sequences without completions
  FIELD(uint32_t, num_live);       // sequences that are not free
  FIELD(uint32_t, cq_need);        // completions that the step in flight may post
  FIELD(uint32_t, cq_drafts);      // those that drafts may add to it, while a step is composed
  FIELD(uint32_t, cq_held);        // those of the step that is launched in segments
  FIELD(uint32_t, open);           // has room for the completions of a step
  FIELD(uint64_t, lease_seen_ns);  // this and the next by awake_ns
  FIELD(uint64_t, flowing_ns);     // when its completions were last read, or nothing waited for that
  FIELD(uint32_t, num_slots);      // held by its sequences
  FIELD(uint32_t, may_take);       // one more of them may have a slot now
  FIELD(uint32_t, num_asking);     // its sequences that wait for a slot and could have one, as the pass began
};

// Stop tokens of a row that are at hand as it ends; of others only the rest are looked up.
constexpr uint32_t kPreparedStopTokens = 6;

// What a decoding row needs to go on in the next step, and what it sampled in this one.
struct NextRow {
  FIELDS_OF(NextRow);
  FIELD(uint64_t, token_place);  // in `tokens`
  FIELD(uint64_t, table_place);  // in `block_tables`
  FIELD(int32_t, position);
  FIELD(int32_t, kv_slot);
  FIELD(uint32_t, block);                            // that it starts; kNone: none
  FIELD(uint32_t, window_block);                     // that holds its token
  FIELD(uint32_t, stops_at);                         // in `stop_tokens`
  FIELD(uint16_t, num_stops);                        // that may end it already
  FIELD(uint8_t, looks_up);                          // DraftSources, if the token ends an n-gram of which is to draft
  FIELD(uint8_t, guesses);                           // likewise, if the row's automaton leaves no choice behind it
  FIELD_ARRAY(int32_t, stops, kPreparedStopTokens);  // the first of them, and kInvalidLogits
  FIELD(int32_t, token);
  FIELD(float, logprob);
};
static_assert(sizeof(NextRow) % 16 == 8, "rows that lanes of a GPU read at once lie in different banks");

struct DecisionLogEntry {
  FIELDS_OF(DecisionLogEntry);
  FIELD(uint32_t, step);
  FIELD(uint32_t, row);
  FIELD(uint32_t, sequence);
  FIELD(uint32_t, slot);
  FIELD(uint32_t, num_computed);
  FIELD(RowKind, kind);
  FIELD(uint32_t, num_tokens);
  FIELD(uint32_t, last_block);
  FIELD(uint32_t, graph);
};

// Places of a slot's text in its automaton, and lists of tokens: one for each row of a step, and one for the step
// before.
BLINK_FN uint32_t lists_of_slot(const Geometry& g) { return g.spec_tokens + kListsOfSlot; }

BLINK_FN uint64_t num_sequences(const Geometry& g) { return uint64_t(g.num_queue_pairs) * g.sequences_per_queue_pair; }

// Every array is declared with its number of elements; they lie behind the State in this order (state_arrays.h).
struct State {
  FIELDS_OF(State);
  FIELD(Geometry, geometry);
  // in the region
  FIELD(Header*, header);
  FIELD(Control*, control);
  FIELD(TraceEntry*, trace);
  FIELD(AdapterWords*, adapter_words);
  FIELD(uint8_t*, queue_pairs);
  FIELD(QueuePairLayout, queue_pair);

  // the steps, which the model reads and writes
  STATE_ARRAYS(StepBuffers, whole);
  STATE_ARRAYS(StepBuffers, segmented);  // of a step that is launched in segments

  // tables of slots, which the model reads
  STATE_ARRAY(SlotParams, params, g.num_slots);
  STATE_ARRAY(int32_t, stop_tokens, uint64_t(g.num_slots) * kMaxStopTokens);
  STATE_ARRAY(int32_t, bias_tokens, uint64_t(g.num_slots) * kMaxLogitBiases);
  STATE_ARRAY(float, bias_values, uint64_t(g.num_slots) * kMaxLogitBiases);
  STATE_ARRAY(int32_t, block_tables, uint64_t(g.num_slots) * g.max_blocks);
  STATE_ARRAY(int32_t, window_tables, g.num_window_blocks == 0 ? 0 : uint64_t(g.num_slots) * g.max_blocks);
  STATE_ARRAY(int32_t, tokens, uint64_t(g.num_slots) * g.max_model_len);
  STATE_ARRAY(int32_t, predictions, g.spec_tokens == 0 ? 0 : uint64_t(g.num_slots) * g.max_model_len);
  STATE_ARRAY(HeadDraft, head_drafts, g.has_draft_head ? g.num_slots : 0);
  STATE_ARRAY(Hash, slot_hashes, uint64_t(g.num_slots) * g.max_blocks);

  // what constrained texts may look like
  STATE_ARRAY(uint8_t, automata, uint64_t(g.num_automata) * kMaxAutomatonBytes);
  STATE_ARRAY(AutomatonPlace, automaton_places, uint64_t(g.num_slots) * lists_of_slot(g));
  STATE_ARRAY(uint32_t, token_bitmasks, uint64_t(g.num_slots) * lists_of_slot(g) * list_words(g.vocab_size));
  STATE_ARRAY(uint32_t, token_starts, g.vocab_size + 1);  // in token_text; writer: engine, before the scheduler starts
  STATE_ARRAY(uint8_t, token_text, g.vocab_bytes);
  STATE_ARRAY(TokenEntry, token_index, g.token_entries);  // likewise

  STATE_ARRAY(int32_t, adapter_places,
              g.num_adapter_slots);  // index + 1 of the adapter of which each is a copy; 0: none

  // the scheduler's own
  STATE_ARRAY(CopyOrder, copy_order, 1);  // the last one
  STATE_ARRAY(AdapterUse, adapters, g.num_adapters);
  STATE_ARRAY(uint32_t, adapter_stamps, g.num_adapter_slots);  // when each was last taken
  STATE_ARRAY(AutomatonEntry, automaton_entries, g.num_automata);
  STATE_ARRAY(uint32_t, ngram_heads, g.spec_tokens == 0 ? 0 : uint64_t(g.num_slots) * g.ngram_entries);
  STATE_ARRAY(AnswerToken, answers, g.answer_tokens);
  STATE_ARRAY(uint32_t, answer_heads, g.answer_entries);
  STATE_ARRAY(NextRow, next_rows, g.max_num_seqs);
  STATE_ARRAY(GraphCost, costs, g.num_graphs);
  STATE_ARRAY(MeasuredCost, measured_costs, g.num_graphs);
  STATE_ARRAY(QueuePairState, qps, g.num_queue_pairs);
  STATE_ARRAY(Flow, flows, uint64_t(g.num_queue_pairs) * kFlows);
  STATE_ARRAY(Sequence, sequences, num_sequences(g));
  STATE_ARRAY(uint32_t, running, g.max_num_seqs);
  STATE_ARRAY(uint32_t, waiting, num_sequences(g));
  STATE_ARRAY(uint32_t, free_slots, g.num_slots);
  STATE_ARRAY(uint32_t, scratch, num_sequences(g));  // the list that one phase of a step collects
  STATE_ARRAY(uint32_t, victims, most(g.num_blocks, g.num_window_blocks));  // blocks that one phase of a step collects
  STATE_ARRAY(Sqe, inbox, kPollBatch);
  STATE_ARRAY(uint32_t, ref_counts, g.num_blocks);
  STATE_ARRAY(uint32_t, free_blocks, g.num_blocks);
  STATE_ARRAY(uint32_t, block_hashed, g.num_blocks);
  STATE_ARRAY(Hash, block_hashes, g.num_blocks);
  STATE_ARRAY(uint32_t, block_registrations, g.num_blocks);  // how often each was registered
  STATE_ARRAY(Registration, block_ids, g.num_blocks);        // of a registered block: its own registration
  STATE_ARRAY(Registration, block_parents, g.num_blocks);    // of a registered block: the one before it in its prompt
  STATE_ARRAY(int32_t, block_tokens, uint64_t(g.num_blocks) * g.block_size);  // of a registered block
  STATE_ARRAY(uint32_t, block_stamps, g.num_blocks);
  STATE_ARRAY(uint32_t, block_windows, g.num_window_blocks == 0 ? 0 : g.num_blocks);  // likewise: its window block + 1
  STATE_ARRAY(uint32_t, window_refs, g.num_window_blocks);
  STATE_ARRAY(uint32_t, free_window_blocks, g.num_window_blocks);
  STATE_ARRAY(uint32_t, window_owners, g.num_window_blocks);  // registered block + 1 whose it is; 0: nobody's
  STATE_ARRAY(uint32_t, window_stamps, g.num_window_blocks);
  STATE_ARRAY(LruEntry, window_lru, g.window_lru_entries);
  STATE_ARRAY(uint32_t, block_snapshots, g.num_blocks);      // of a registered block: index + 1 of the states behind it
  STATE_ARRAY(uint32_t, snapshot_blocks, g.num_snapshots);   // whose it is: block + 1; 0: it is free; kNone: nobody's
  STATE_ARRAY(uint32_t, snapshot_stamps, g.num_snapshots);   // when it was last used
  STATE_ARRAY(uint32_t, snapshot_readers, g.num_snapshots);  // sequences that are to begin with it
  STATE_ARRAY(uint32_t, hash_table, g.hash_entries);         // block + 1; 0 = empty
  STATE_ARRAY(LruEntry, lru, g.lru_entries);
  STATE_ARRAY(DecisionLogEntry, log, g.log_entries);
  STATE_ARRAYS(EventLog, events);
  STATE_ARRAYS(HostTier, host);

  FIELD(uint32_t, booted);
  FIELD(uint32_t, in_flight);
  FIELD(uint32_t, failed);
  FIELD(uint32_t, fast_path_ready);  // the next step may be as this one, see fast_path.h
  FIELD(uint32_t, next_blocks);      // that it takes then, the last free ones
  FIELD(uint32_t, next_guesses);     // its rows with NextRow::guesses
  FIELD(uint32_t, stats_dirty);
  FIELD(uint32_t, num_running);
  FIELD(uint32_t, num_waiting);
  FIELD(uint32_t, num_free_slots);
  FIELD(uint32_t, num_free_blocks);
  FIELD(uint32_t, num_evictable);
  FIELD(uint32_t, num_cancels);
  FIELD(uint32_t, reset_asked);  // the prefix cache is to be emptied
  FIELD(PauseMode, pause_mode);  // that frontends have asked for
  FIELD(Drop, pause_drop);       // that is to be taken away when the pause begins
  FIELD(uint32_t, pause_asked);  // a pause has still to begin
  FIELD(uint32_t, hold);         // Control::hold as it was read last
  FIELD(uint32_t, held);         // Control::held
  FIELD(uint32_t, lru_head);
  FIELD(uint32_t, lru_count);
  FIELD(uint32_t, next_stamp);
  FIELD(uint32_t, num_free_window_blocks);
  FIELD(uint32_t, num_evictable_window_blocks);
  FIELD(uint32_t, window_lru_head);
  FIELD(uint32_t, window_lru_count);
  FIELD(uint32_t, next_window_stamp);
  FIELD(uint32_t, snapshot_stamp);
  FIELD(uint32_t, num_drafts);                          // tokens of the whole step that is composed or in flight
  FIELD_ARRAY(uint32_t, draft_counts, kMaxDrafts + 2);  // of one retire(): drafts, their tokens, accepted ones by place
  FIELD(uint32_t, answer_head);                         // tokens that were written to the ring of recent answers
  FIELD(uint32_t, num_indexed_answer_tokens);           // of these, those whose n-grams are in the table
  FIELD(uint32_t, last_answer);                         // number of the newest one
  FIELD(uint32_t, step_admitted);
  FIELD(uint32_t, step_preempted);
  FIELD(uint32_t, log_count);
  FIELD(uint32_t, engine_state);
  FIELD(uint32_t, pass);
  FIELD(uint32_t, num_live);
  FIELD(uint32_t, num_automata_used);  // entries with users
  FIELD(uint32_t, automaton_stamp);
  FIELD(uint32_t, adapter_stamp);
  FIELD(uint32_t, copied_adapter);  // index + 1 of the one whose copy is in flight, as far as it is known; 0: none is
  FIELD(uint32_t, automaton_bytes_copied);  // while this step is composed
  FIELD(uint32_t, num_attached);            // queue pairs, at least 1
  FIELD(uint32_t, num_flows);               // that have sequences
  FIELD(uint32_t, num_best_effort);         // live sequences of that class
  FIELD(uint32_t, num_paced);               // live sequences that have a target (pacing.h)
  FIELD(uint32_t, step_class);              // StepClass of the step that is being composed
  FIELD(uint32_t, step_tokens);             // that it may take
  FIELD(uint32_t, in_flight_kind);          // StepKind of the launch in flight
  FIELD(uint32_t, segment);                 // of the step that is launched in segments: in flight, or next
  FIELD(uint32_t, num_segments);            // of it; 0: there is none
  FIELD(uint64_t, segmented_ns);            // that its segments have taken
  FIELD(uint64_t, segmented_cost_ns);       // that all of them are expected to take
  FIELD(StepClass, segmented_class);
  FIELD(uint32_t, segmented_best_effort_rows);
  FIELD(uint64_t, urgent_ns);             // end of the last step that moved urgent sequences on
  FIELD(int64_t, best_effort_credit_ns);  // of its share of the time; negative: debt
  FIELD(int64_t, draft_credit);           // tokens, of kSureChance each, that drafts may cost (draft_credit.h)
  FIELD(uint64_t, draft_credit_until);    // Statistics::generation_tokens for which it was earned
  FIELD(uint32_t, draft_plain_tokens);    // of the step with drafts in flight, if it had none
  FIELD(uint64_t, draft_plain_ns);        // that it would take then
  FIELD(uint64_t, burst_due);  // step by which the bursts of prompts that were taken as a whole are made up for
  FIELD(uint64_t, preemption_credit_ns);  // of decoding's time that prefill may take
  FIELD(uint64_t, preemption_until);      // step up to which a prompt that preempts is expected
  FIELD(uint64_t, next_due_ns);           // the first token behind those of the step in flight
  FIELD(uint64_t, least_target_ns);       // of its rows
  FIELD(uint64_t, held_until_ns);         // 0: the next launch does not wait
  FIELD(uint64_t, held_since_ns);
  FIELD(Account, account);
  FIELD(uint32_t, prompt_share);  // tokens of a prompt in this step while other flows' prompts wait
  FIELD(uint64_t, flow_floor);    // least counter of the flows that a step served, as far as it has risen
  FIELD(uint64_t, next_arrival);
  FIELD(uint64_t, step);
  FIELD(uint64_t, pass_ns);   // when the last pass began
  FIELD(uint64_t, awake_ns);  // a clock that stands while the scheduler does: what lease timeouts are measured by
  FIELD(uint64_t, heartbeat_ns);
  FIELD(uint64_t, heartbeat);
  FIELD(uint64_t, retired_ns);
  FIELD(uint64_t, launched_ns);  // when what is in flight was launched, or what was last
  FIELD(uint64_t, hash_key_low);
  FIELD(uint64_t, hash_key_high);
  FIELD(uint64_t, num_fast_steps);
  FIELD(Statistics, statistics);
};

// Visit the words of the region that the state points at, and where they lie.
template <class Visit>
BLINK_FN void visit_region(State& s, const RegionLayout& layout, Visit visit) {
  visit(s.header, 0);
  visit(s.control, kControlOffset);
  visit(s.trace, layout.trace);
  visit(s.adapter_words, layout.adapters);
  visit(s.events.words, layout.kv_events);
  visit(s.queue_pairs, layout.queue_pairs);
}

}  // namespace blink
