// SPDX-License-Identifier: Apache-2.0
// The scheduler's own memory (GPU memory, or the heap of the CPU engine): sequences, KV blocks and the batch.
// Everything is written by the scheduler but the model's results. state_arrays.h places the arrays.
#pragma once

#include "region/layout.h"

namespace blink {

constexpr uint32_t kNone = 0xffffffffu;

enum class SequenceStatus : uint32_t { kFree = 0, kWaiting = 1, kRunning = 2 };

// One generation that the scheduler knows; index = queue pair * sequences_per_queue_pair + tag.
// A waiting sequence with blocks is parked; one with a slot but no blocks was preempted and recomputes.
struct Sequence {
  SequenceStatus status;
  uint32_t queue_pair;
  uint32_t slot;
  uint32_t cancelled;
  FinishReason finish;
  uint32_t admitted;      // the arena was consumed, kAdmitted was sent
  uint32_t num_tokens;    // prompt and generated
  uint32_t num_computed;  // tokens whose KV is in blocks; trails num_tokens by 1 while decoding
  uint32_t num_generated;
  uint32_t num_blocks;
  uint32_t num_registered;  // leading blocks that the prefix cache knows
  uint32_t scheduled;       // tokens in the current step
  uint32_t skipped_pass;    // the pass of compose() that had no room for it
  uint64_t arrival;
  uint64_t queued_ns;  // start of the present wait
  uint64_t waited_ns;  // in all waits before
  Sqe sqe;
};

// What sampling needs of a slot; 16 words, read by the model's kernels.
struct SlotParams {
  float temperature;
  float top_p;
  float min_p;
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
  uint32_t top_k;
  uint32_t seed_low;
  uint32_t seed_high;
  int32_t num_logprobs;
  uint32_t num_prompt_tokens;
  uint32_t min_tokens;
  uint32_t num_stop_tokens;
  uint32_t num_biases;
  uint32_t reserved[2];
};
static_assert(sizeof(SlotParams) == 64, "a slot's parameters are 16 words");

struct Hash {
  uint64_t low, high;
};
BLINK_FN bool operator==(Hash a, Hash b) { return a.low == b.low && a.high == b.high; }

struct LruEntry {
  uint32_t block, stamp;
};

// The scheduler's side of one queue pair.
struct QueuePairState {
  uint32_t sq_head, sq_tail;
  uint32_t cq_head, cq_tail;
  uint32_t attached;     // generation; 0 = nobody
  uint32_t attaching;    // generation that waits for the old sequences to end
  uint32_t last_attach;  // generation seen last in the frontend's word
  uint32_t expired;      // leases lost
  uint32_t lease;
  uint32_t closing;   // end all its sequences in silence
  uint32_t num_live;  // sequences that are not free
  uint32_t cq_need;   // completions that the step in flight may post
  uint32_t open;      // has room for the completions of a step
  uint64_t lease_seen_ns;
};

struct BatchHeader {
  uint32_t num_rows, num_tokens, num_decode_rows, graph;
  uint64_t step;
  uint32_t reserved[2];
};

struct StepOutput {
  uint64_t done_step;  // the step that finished, stored with release
  uint32_t failed;
};

struct DecisionLogEntry {
  uint32_t step, row, sequence, slot, num_computed, scheduled, last_block, graph;
};

struct State {
  Geometry geometry;
  Header* header;
  Control* control;
  TraceEntry* trace;
  uint8_t* queue_pairs;  // in the region
  QueuePairLayout queue_pair;

  QueuePairState* qps;
  Sequence* sequences;
  uint32_t* running;
  uint32_t* waiting;
  uint32_t* free_slots;
  uint32_t* scratch;  // the list that one phase of a step collects
  uint32_t* victims;  // blocks under eviction
  Sqe* inbox;

  uint32_t* ref_counts;
  uint32_t* free_blocks;
  uint32_t* block_hashed;
  Hash* block_hashes;
  uint32_t* block_stamps;
  uint32_t* hash_table;  // block + 1; 0 = empty
  LruEntry* lru;

  Hash* slot_hashes;  // [num_slots, max_blocks]
  // [num_slots, ...] tables that the model reads
  SlotParams* params;
  int32_t* tokens;
  int32_t* block_tables;
  int32_t* stop_tokens;
  int32_t* bias_tokens;
  float* bias_values;
  // the batch
  BatchHeader* batch;
  int32_t* input_ids;
  int32_t* positions;
  int32_t* kv_slots;
  int32_t* query_starts;
  int32_t* context_lens;
  int32_t* row_slots;
  uint32_t* row_sequences;
  // the model's results
  StepOutput* output;
  int32_t* sampled_tokens;
  float* sampled_logprobs;
  int32_t* top_tokens;
  float* top_logprobs;
  DecisionLogEntry* log;

  uint32_t booted, in_flight, failed, stats_dirty;
  uint32_t num_running, num_waiting, num_free_slots, num_free_blocks;
  uint32_t num_evictable, num_cancels, lru_head, lru_count, next_stamp;
  uint32_t step_admitted, step_preempted, log_count, engine_state;
  uint32_t pass;
  uint32_t num_live;
  uint64_t next_arrival, step, heartbeat_ns, heartbeat, retired_ns;
  Statistics statistics;
};

}  // namespace blink
