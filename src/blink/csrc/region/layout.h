// SPDX-License-Identifier: Apache-2.0
// The region: every struct that frontend and engine share, with the one writer of each word.
// Python derives its numpy dtypes from these structs (layout_table.h); nothing here is written down a second time.
// A word that is no FIELD is padding.
//
//   Header | Control | Trace ring | AdapterWords | KV events (kv_events.h) | queue pair 0: FrontendWords,
//   SchedulerWords, SQ, CQ, arena | queue pair 1 | ...
#pragma once

#include "region/adapter_words.h"
#include "region/automaton.h"
#include "region/codes.h"
#include "region/completion.h"
#include "region/fields.h"
#include "region/kv_events.h"
#include "region/trace.h"
#include "sampler/params.h"

namespace blink {

constexpr uint64_t kMagic = 0x314b4e494c42ull;  // "BLINK1"
constexpr uint32_t kLayoutVersion = 8;          // changes when the meaning of a word does
constexpr uint32_t kMaxGraphs = 256;
constexpr uint32_t kFlows = 256;  // of a queue pair
constexpr uint32_t kMaxStopTokens = 128;
constexpr uint32_t kInlineStopTokens = 8;
constexpr uint32_t kMaxLogitBiases = 1024;
constexpr uint32_t kMaxLogitBias = 100;  // of either sign
constexpr uint32_t kBlockHashBytes = 16;
constexpr uint32_t kNoTpotTarget = 0xffffffffu;  // Sqe::tpot_target_us: none, whatever the engine's is
constexpr uint32_t kMaxTpotTargetUs = 10'000'000;
// The newest tokens of a sequence that may be taken back: what they see is not freed.
constexpr uint32_t kRollbackTokens = 16;
constexpr uint32_t kMaxRowsOfSlot = kRollbackTokens;  // in one step: its newest token, and drafts behind it
constexpr uint32_t kMaxDrafts = kMaxRowsOfSlot - 1;
static_assert(kAcceptedRank + kMaxDrafts < 1u << kPredictedBits);
constexpr uint32_t kMostNgram = 16;  // Geometry::ngram_max at most
constexpr uint32_t kCacheLine = 64;
constexpr uint32_t kPage = 4096;

// What one graph holds, and so a step that it runs: a batch of at most so many tokens and rows.
struct GraphSize {
  FIELDS_OF(GraphSize);
  FIELD(uint32_t, tokens);
  FIELD(uint32_t, rows);
};

// Sizes and policy of one engine. writer: engine, before the epoch.
struct Geometry {
  FIELDS_OF(Geometry);
  FIELD(uint32_t, num_queue_pairs);
  FIELD(uint32_t, sq_entries);                // power of two
  FIELD(uint32_t, cq_entries);                // power of two
  FIELD(uint32_t, arena_bytes);               // multiple of 64
  FIELD(uint32_t, sequences_per_queue_pair);  // tags 0 .. n-1
  FIELD(uint32_t, max_num_seqs);
  FIELD(uint32_t, max_rows);  // of a step: as many as sequences run, or more where drafts are verified
  FIELD(uint32_t, num_slots);
  FIELD(uint32_t, max_model_len);
  FIELD(uint32_t, block_size);
  FIELD(uint32_t, num_blocks);
  FIELD(uint32_t, max_blocks);  // of one sequence
  FIELD(uint32_t, max_num_batched_tokens);
  FIELD(uint32_t, window);              // tokens that a query sees in layers whose blocks are freed behind it
  FIELD(uint32_t, num_window_blocks);   // of these layers; 0: all layers keep all tokens
  FIELD(uint32_t, window_lru_entries);  // power of two, at least four times num_window_blocks
  FIELD(uint32_t, num_snapshots);       // of recurrent states, for the prefix cache; 0: the model has none
  FIELD(uint32_t, snapshot_interval);   // blocks of an answer between two of them
  FIELD(uint32_t, vocab_size);
  FIELD(Task, task);
  FIELD(uint32_t, vector_width);        // floats that each prompt becomes; 0: prompts are continued
  FIELD(uint32_t, normalizes_vectors);  // clients get them with a length of 1, unless they ask for others
  FIELD(uint32_t, prefix_caching);
  FIELD(uint32_t, priority_policy);
  FIELD(uint32_t, trace_entries);   // power of two
  FIELD(uint32_t, hash_entries);    // power of two, at least twice num_blocks
  FIELD(uint32_t, lru_entries);     // power of two, at least four times num_blocks
  FIELD(uint32_t, log_entries);     // decision log of tests; 0 = off
  FIELD(uint32_t, spec_tokens);     // the most drafts of a sequence in one step (drafts.h); 0: none are made
  FIELD(uint32_t, ngram_min);       // tokens that a draft's place in the text has to have in common with its end
  FIELD(uint32_t, ngram_max);       // likewise, at first
  FIELD(uint32_t, ngram_entries);   // of a slot's table of n-grams; power of two
  FIELD(uint32_t, suffix_depth);    // tokens of a match that let a draft be longer; 0: any match does (drafts.h)
  FIELD(uint32_t, suffix_factor);   // tokens of a draft for each of its match, times 256
  FIELD(uint32_t, suffix_chance);   // least chance that a draft's tokens are accepted, of 256
  FIELD(uint32_t, num_answers);     // recent ones that drafts are copied from (answers.h); 0: none are kept
  FIELD(uint32_t, answer_tokens);   // of them all; power of two
  FIELD(uint32_t, answer_entries);  // of their table of n-grams; power of two
  FIELD(uint32_t, has_draft_head);  // whether the model writes drafts, too (head_drafts.h)
  FIELD(uint32_t, token_entries);   // of the table of tokens by their bytes; power of two; 0: no draft needs it
  FIELD(uint32_t, num_decode_graphs);
  FIELD(uint32_t, num_graphs);
  FIELD(uint32_t, first_scoring_graph);
  FIELD(uint32_t, num_plain_graphs);   // those behind them are the same once more, for steps that do more (cost.h)
  FIELD(uint32_t, num_host_blocks);    // of the KV cache in host memory; 0: there are none
  FIELD(uint32_t, host_hash_entries);  // power of two, at least twice num_host_blocks
  FIELD(uint32_t, host_copies);        // of the ring of copies; power of two
  FIELD(uint32_t, num_kv_events);      // of the ring of the prefix cache's events; power of two; 0: none are told
  FIELD(uint32_t, num_automata);       // that the engine holds at once
  FIELD(uint32_t, num_adapters);       // that the host's memory holds at once; 0: none are served
  FIELD(uint32_t, num_adapter_slots);  // adapters that the model holds at once: those of one step
  FIELD(uint32_t, vocab_bytes);        // of all tokens' texts; 0: nothing can be constrained
  FIELD(uint32_t, best_effort_share);  // thousandths of the time, while urgent work is there
  FIELD(uint32_t, overtake_share);     // thousandths of the time that prefill may take from decoding by preempting it
  FIELD(uint64_t, lease_timeout_ns);
  FIELD(uint64_t, max_queue_age_ns);
  FIELD(uint64_t, stall_timeout_ns);
  FIELD(uint64_t, step_target_ns);         // of steps in which sequences decode; 0: chosen by size_step()
  FIELD(uint64_t, patient_steps);          // of that kind in which prompts should be computed; 0: few, and bursts
  FIELD(uint64_t, urgent_tpot_target_ns);  // 0: none
  FIELD(uint64_t, tpot_target_ns);         // of sequences that ask for none of their own (pacing.h); 0: none
  FIELD(uint64_t, segment_ns);             // about the longest segment of a step
  // Graphs of decoding rows alone (a token each), then graphs of any rows, then those of the same sizes that keep every
  // token's logits for their logprobs; each kind ascending. A graph's index is its place.
  FIELD_ARRAY(GraphSize, graphs, kMaxGraphs);
};

// Whether prompts become vectors, and nothing is generated.
BLINK_FN bool is_pooling(const Geometry& g) { return g.vector_width > 0; }
// Tokens of a prompt: one that is continued leaves a place for the first new token.
BLINK_FN uint32_t longest_prompt(const Geometry& g) { return is_pooling(g) ? g.max_model_len : g.max_model_len - 1; }

// writer: engine; `epoch` is stored last, with release, and is never 0 in a usable region.
struct Header {
  FIELDS_OF(Header);
  FIELD(uint64_t, magic);
  FIELD(uint64_t, digest);
  FIELD(uint64_t, epoch);
  FIELD(uint64_t, trace_offset);
  FIELD(uint64_t, adapters_offset);
  FIELD(uint64_t, kv_events_offset);
  FIELD(uint64_t, queue_pairs_offset);
  FIELD(uint64_t, queue_pair_bytes);
  FIELD_ARRAY(uint8_t, hash_key, 16);
  FIELD_ARRAY(uint8_t, kv_event_root, 16);  // what chains begin with whose events are published
  FIELD_ARRAY(char, model, 256);
  FIELD_ARRAY(char, fingerprint, 32);  // of what decides the bits of an answer; empty: other requests do, too
  FIELD(Geometry, geometry);
};

// Counters since boot, then gauges. writer: scheduler.
struct Statistics {
  FIELDS_OF(Statistics);
  FIELD(uint64_t, num_steps);
  FIELD(uint64_t, decode_launches);
  FIELD(uint64_t, mixed_launches);
  FIELD(uint64_t, computed_tokens);
  FIELD(uint64_t, padded_tokens);
  FIELD(uint64_t, prompt_tokens);  // of admitted sequences
  FIELD(uint64_t, generation_tokens);
  FIELD(uint64_t, prefix_queries);              // tokens looked up
  FIELD(uint64_t, prefix_hits);                 // tokens found
  FIELD(uint64_t, best_effort_prefix_queries);  // of these, best-effort requests'
  FIELD(uint64_t, best_effort_prefix_hits);
  FIELD(uint64_t, host_queries);  // tokens looked up in host memory, and restored
  FIELD(uint64_t, host_hits);
  FIELD(uint64_t, host_blocks_stored);
  FIELD(uint64_t, num_host_blocks_used);
  FIELD(uint64_t, prefix_resets);
  FIELD(uint64_t, kv_event_restarts);  // as the ring of events was full
  FIELD(uint64_t, num_pauses);         // that were asked for and are in effect, or were taken back before
  FIELD(uint64_t, num_preemptions);
  FIELD(uint64_t, num_parked);
  FIELD(uint64_t, evicted_blocks);
  FIELD(uint64_t, finished_stop);
  FIELD(uint64_t, finished_length);
  FIELD(uint64_t, finished_abort);
  FIELD(uint64_t, finished_error);
  FIELD(uint64_t, num_rejected);
  FIELD(uint64_t, expired_leases);
  FIELD(uint64_t, running_ns);     // in which a step was in flight
  FIELD(uint64_t, scheduling_ns);  // between the end of a step, or the end of idleness, and the next launch
  FIELD(uint64_t, held_ns);        // in which no step was in flight, as none was due (pacing.h)
  FIELD(uint64_t, num_running);
  FIELD(uint64_t, num_waiting);
  FIELD(uint64_t, num_running_best_effort);  // of these, by what was asked
  FIELD(uint64_t, num_waiting_best_effort);
  FIELD(uint64_t, num_blocks);
  FIELD(uint64_t, num_blocks_used);
  FIELD(uint64_t, num_blocks_cached);
  FIELD(uint64_t, num_window_blocks);  // of layers with a window, likewise
  FIELD(uint64_t, num_window_blocks_used);
  FIELD(uint64_t, num_window_blocks_cached);
  FIELD(uint64_t, num_drafts);  // rows with draft tokens, these tokens, and those that were accepted
  FIELD(uint64_t, draft_tokens);
  FIELD(uint64_t, accepted_tokens);
  FIELD_ARRAY(uint64_t, accepted_at, kMaxDrafts);  // likewise, by their place in the draft
  FIELD(uint64_t, automata_loaded);
  FIELD(uint64_t, num_automata_used);
};

struct Control {
  FIELDS_OF(Control);
  // writer: scheduler
  alignas(64) FIELD(uint64_t, heartbeat);  // writer: the engine while it has the scheduler's device
  FIELD(uint32_t, state);                  // EngineState
  FIELD(uint32_t, error_code);
  FIELD(uint32_t, error_place);
  FIELD(uint32_t, error_detail);
  FIELD(uint32_t, held);  // the `hold` that is in effect: nothing is in flight, and nothing is launched
  // writer: engine
  alignas(64) FIELD(uint32_t, drain);
  FIELD(uint32_t, stop);
  FIELD(uint32_t, hold);             // a number, while the scheduler is to launch nothing (pause.h); 0: it may
  FIELD(uint32_t, hold_drop);        // Drop, with it; stored before `hold`
  FIELD(uint32_t, absent);           // Absent bits: what the model lacks while `hold` is set
  FIELD(uint32_t, leave);            // the `hold` in effect, for which the scheduler gives its device up; 0: for none
  FIELD(uint64_t, energy_mj);        // of the engine's GPU since it serves; 0: nothing counts it
  FIELD(uint64_t, token_energy_uj);  // for each token generated in the last minute; 0: none was
  // Steps by their number of tokens, then the sum of these (region/step_tokens.py).
  alignas(64) FIELD_ARRAY(uint64_t, step_tokens, 15);
  // writer: scheduler
  alignas(64) FIELD(Statistics, statistics);
};

// writer: frontend. The scheduler reads all four at once (intake.h).
struct FrontendWords {
  FIELDS_OF(FrontendWords);
  alignas(64) FIELD(uint32_t, sq_tail);
  FIELD(uint32_t, cq_head);
  FIELD(uint32_t, lease);   // any change renews
  FIELD(uint32_t, attach);  // generation that asks for the queue pair; never 0
};

// writer: scheduler
struct SchedulerWords {
  FIELDS_OF(SchedulerWords);
  alignas(64) FIELD(uint32_t, sq_head);
  FIELD(uint32_t, attached);  // the generation that owns the queue pair; 0 after its lease expired
  FIELD(uint32_t, cq_tail);
};

// Submission queue entry. writer: frontend. Offsets are bytes from the start of the arena, multiples of 4.
struct Sqe {
  FIELDS_OF(Sqe);
  FIELD(uint32_t, opcode);
  FIELD(uint32_t, service_class);
  FIELD(uint64_t, sequence);  // low half: tag; high half: the frontend's generation of that tag
  FIELD(uint32_t, prompt_offset);
  FIELD(uint32_t, num_prompt_tokens);
  FIELD(uint32_t, hashes_offset);  // kBlockHashBytes each
  FIELD(uint32_t, num_hashes);
  FIELD(uint32_t, more_stop_offset);  // int32 each: the stop tokens beyond kInlineStopTokens
  FIELD(uint32_t, num_stop_tokens);
  FIELD(uint32_t, bias_offset);  // int32 tokens, then float biases
  FIELD(uint32_t, num_biases);
  FIELD_ARRAY(int32_t, stop_tokens, kInlineStopTokens);
  FIELD(uint32_t, max_tokens);
  FIELD(int32_t, priority);
  FIELD(Sampling, sampling);
  FIELD(uint32_t, flow);  // whose request this is, as far as shares go: modulo kFlows
  // What the chain of block hashes begins with. All 0: only the prompt's blocks are to be cached, else those of the
  // answer too.
  FIELD_ARRAY(uint8_t, hash_root, kBlockHashBytes);
  FIELD(uint32_t, automaton_offset);                          // a multiple of kAutomatonUnit
  FIELD(uint32_t, automaton_bytes);                           // 0: the text may be any
  FIELD_ARRAY(uint8_t, automaton_hash, kAutomatonHashBytes);  // its name: equal names of a queue pair, equal automata
  FIELD(uint32_t, tpot_target_us);                            // 0: the engine's
  FIELD(uint32_t, prediction_offset);                         // int32 tokens that the answer may have much of
  FIELD(uint32_t, num_prediction_tokens);
  FIELD(uint32_t, adapter);  // index + 1; 0: none
  FIELD(uint32_t, adapter_generation);
  FIELD(uint32_t, pause_mode);  // of a kPause: PauseMode
  FIELD(uint32_t, pause_drop);  // likewise: Drop
  uint32_t reserved[8];
};
static_assert(sizeof(Sqe) == 256, "an SQE is four cache lines");

BLINK_FN constexpr uint64_t align_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// Byte offsets inside one queue pair, which starts with FrontendWords.
struct QueuePairLayout {
  FIELDS_OF(QueuePairLayout);
  FIELD(uint64_t, scheduler_words);
  FIELD(uint64_t, sq);
  FIELD(uint64_t, cq);
  FIELD(uint64_t, arena);
  FIELD(uint64_t, bytes);
};

BLINK_FN QueuePairLayout queue_pair_layout(const Geometry& g) {
  QueuePairLayout l{};
  l.scheduler_words = sizeof(FrontendWords);
  l.sq = l.scheduler_words + sizeof(SchedulerWords);
  l.cq = l.sq + uint64_t(g.sq_entries) * sizeof(Sqe);
  l.arena = align_up(l.cq + uint64_t(g.cq_entries) * sizeof(Cqe), kCacheLine);
  l.bytes = align_up(l.arena + g.arena_bytes, kPage);
  return l;
}

// Byte offsets inside the region, which starts with its Header.
constexpr uint64_t kControlOffset = align_up(sizeof(Header), kCacheLine);

struct RegionLayout {
  uint64_t trace, adapters, kv_events, queue_pairs, bytes;
  QueuePairLayout queue_pair;
};

BLINK_FN RegionLayout region_layout(const Geometry& g) {
  RegionLayout l{};
  l.trace = align_up(kControlOffset + sizeof(Control), kPage);
  l.adapters = align_up(l.trace + g.trace_entries * sizeof(TraceEntry), kPage);
  l.kv_events = align_up(l.adapters + g.num_adapters * sizeof(AdapterWords), kPage);
  l.queue_pairs = align_up(l.kv_events + kv_event_layout(g.num_kv_events, g.block_size).bytes, kPage);
  l.queue_pair = queue_pair_layout(g);
  l.bytes = l.queue_pairs + g.num_queue_pairs * l.queue_pair.bytes;
  return l;
}

BLINK_FN void write_offsets(Header& header, const RegionLayout& layout) {
  header.trace_offset = layout.trace;
  header.adapters_offset = layout.adapters;
  header.kv_events_offset = layout.kv_events;
  header.queue_pairs_offset = layout.queue_pairs;
  header.queue_pair_bytes = layout.queue_pair.bytes;
}

}  // namespace blink
