// SPDX-License-Identifier: Apache-2.0
// The region: every struct that frontend and engine share, with the one writer of each word.
// Python derives its numpy dtypes from these structs (layout_table.h); nothing here is written down a second time.
//
//   Header | Control | Trace ring | queue pair 0: FrontendWords, SchedulerWords, SQ, CQ, arena | queue pair 1 | ...
#pragma once

#include "region/platform.h"

namespace blink {

constexpr uint64_t kMagic = 0x314b4e494c42ull;  // "BLINK1"
constexpr uint32_t kLayoutVersion = 1;
constexpr uint32_t kMaxQueuePairs = 64;
constexpr uint32_t kMaxBuckets = 64;
constexpr uint32_t kMaxStopTokens = 128;
constexpr uint32_t kInlineStopTokens = 8;
constexpr uint32_t kMaxLogitBiases = 1024;
constexpr uint32_t kMaxLogprobs = 20;

enum class Opcode : uint32_t { kSubmit = 1, kCancel = 2 };
enum class CqeKind : uint8_t { kAdmitted = 1, kToken = 2, kTopLogprob = 3, kFinished = 4, kRejected = 5 };
enum class FinishReason : uint8_t { kNone = 0, kStop = 1, kLength = 2, kAbort = 3, kError = 4 };
enum class ServiceClass : uint32_t { kLatencySensitive = 0, kBestEffort = 1 };
enum class EngineState : uint32_t { kBooting = 0, kReady = 1, kDraining = 2, kDrained = 3, kStopped = 4, kFailed = 5 };

// Why an SQE was refused; travels in Cqe::token of a kRejected entry.
enum class RejectCode : uint32_t {
  kNone = 0,
  kOpcode = 1,
  kTag = 2,
  kTagBusy = 3,
  kUnknownSequence = 4,
  kPromptLength = 5,
  kPromptRange = 6,
  kPromptToken = 7,
  kStopTokens = 8,
  kLogitBias = 9,
  kHashes = 10,
  kSamplingValue = 11,
  kMaxTokens = 12,
  kServiceClass = 13,
  kDraining = 14,
};

// Why the scheduler stopped; Control::error_code.
enum class ErrorCode : uint32_t {
  kNone = 0,
  kStepFailed = 1,         // the model reported a failure
  kSampledTokenRange = 2,  // the model wrote a token outside the vocabulary
  kFreeListCorrupt = 3,
  kRefCountCorrupt = 4,
  kHashTableCorrupt = 5,
  kLaunchFailed = 6,
};

// Sizes and policy of one engine. writer: engine, before the epoch.
struct Geometry {
  uint32_t num_queue_pairs;
  uint32_t sq_entries;                // power of two
  uint32_t cq_entries;                // power of two
  uint32_t arena_bytes;               // multiple of 64
  uint32_t sequences_per_queue_pair;  // tags 0 .. n-1
  uint32_t max_num_seqs;
  uint32_t num_slots;
  uint32_t max_model_len;
  uint32_t block_size;
  uint32_t num_blocks;
  uint32_t max_blocks;  // of one sequence
  uint32_t max_num_batched_tokens;
  uint32_t vocab_size;
  uint32_t prefix_caching;
  uint32_t priority_policy;
  uint32_t trace_entries;  // power of two
  uint32_t hash_entries;   // power of two, at least twice num_blocks
  uint32_t lru_entries;    // power of two, at least four times num_blocks
  uint32_t log_entries;    // decision log of tests; 0 = off
  uint32_t num_decode_buckets;
  uint32_t num_mixed_buckets;
  uint32_t reserved;
  uint64_t lease_timeout_ns;
  uint64_t max_queue_age_ns;
  uint32_t decode_buckets[kMaxBuckets];  // rows, ascending
  uint32_t mixed_buckets[kMaxBuckets];   // tokens, ascending
};

// writer: engine; `epoch` is stored last, with release, and is never 0 in a usable region.
struct Header {
  uint64_t magic;
  uint64_t digest;
  uint64_t epoch;
  uint64_t region_bytes;
  uint32_t version;
  uint32_t trace_offset;
  uint64_t queue_pairs_offset;
  uint64_t queue_pair_bytes;
  uint8_t hash_key[16];
  char model[256];
  Geometry geometry;
};

// Counters since boot, then gauges. writer: scheduler.
struct Statistics {
  uint64_t num_steps;
  uint64_t decode_launches;
  uint64_t mixed_launches;
  uint64_t computed_tokens;
  uint64_t padded_tokens;
  uint64_t prompt_tokens;  // of admitted sequences
  uint64_t generation_tokens;
  uint64_t prefix_queries;  // tokens looked up
  uint64_t prefix_hits;     // tokens found
  uint64_t num_preemptions;
  uint64_t num_parked;
  uint64_t evicted_blocks;
  uint64_t finished_stop;
  uint64_t finished_length;
  uint64_t finished_abort;
  uint64_t num_rejected;
  uint64_t expired_leases;
  uint64_t num_running;
  uint64_t num_waiting;
  uint64_t num_blocks;
  uint64_t num_blocks_used;
  uint64_t num_blocks_cached;
};

struct Control {
  // writer: scheduler
  alignas(64) uint64_t heartbeat;
  uint32_t state;  // EngineState
  uint32_t error_code;
  uint32_t error_place;
  uint32_t error_detail;
  // writer: engine
  alignas(64) uint32_t drain;
  uint32_t stop;
  // writer: scheduler
  alignas(64) Statistics statistics;
};

// One step. writer: scheduler. Times in nanoseconds of the scheduler's clock.
struct TraceEntry {
  uint64_t step;
  uint64_t retired_ns;   // the previous step's end was seen (equals composed start)
  uint64_t launched_ns;  // this step was launched
  uint32_t graph;
  uint32_t num_rows;
  uint32_t num_tokens;
  uint32_t num_decode_rows;
  uint32_t num_running;
  uint32_t num_waiting;
  uint32_t num_free_blocks;
  uint32_t num_admitted;
  uint32_t num_preempted;
  uint32_t idle_before;  // 1: no step was in flight when this one was composed
};

// writer: frontend
struct FrontendWords {
  alignas(64) uint32_t sq_tail;
  uint32_t cq_head;
  uint32_t lease;   // any change renews
  uint32_t attach;  // generation that asks for the queue pair; never 0
};

// writer: scheduler
struct SchedulerWords {
  alignas(64) uint32_t sq_head;
  uint32_t attached;  // the generation that owns the queue pair; 0 after its lease expired
  uint32_t cq_tail;
};

// Submission queue entry. writer: frontend. Offsets are bytes from the start of the arena, multiples of 4.
struct Sqe {
  uint32_t opcode;
  uint32_t service_class;
  uint64_t sequence;  // low half: tag; high half: the frontend's generation of that tag
  uint64_t seed;
  uint32_t prompt_offset;
  uint32_t num_prompt_tokens;
  uint32_t hashes_offset;  // 16 bytes each
  uint32_t num_hashes;
  uint32_t more_stop_offset;  // int32 each: the stop tokens beyond kInlineStopTokens
  uint32_t num_stop_tokens;
  uint32_t bias_offset;  // int32 tokens, then float biases
  uint32_t num_biases;
  int32_t stop_tokens[kInlineStopTokens];
  float temperature;
  float top_p;
  float min_p;
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
  uint32_t top_k;
  int32_t num_logprobs;  // -1: none
  uint32_t max_tokens;
  uint32_t min_tokens;
  int32_t priority;
  uint32_t reserved[31];
};
static_assert(sizeof(Sqe) == 256, "an SQE is four cache lines");

// Completion queue entry. writer: scheduler; `tag` is stored last, with release.
// tag: bit 0 phase, bits 8-15 CqeKind, bits 16-23 FinishReason, bits 24-31 rank of a kTopLogprob.
struct alignas(32) Cqe {
  uint64_t sequence;
  uint64_t time_ns;
  int32_t token;  // kAdmitted: prompt tokens found in the prefix cache; kRejected: RejectCode
  float logprob;
  uint32_t index;  // ordinal of the generated token
  uint32_t tag;
};
static_assert(sizeof(Cqe) == 32, "two CQEs share a cache line");

BLINK_FN uint32_t cq_phase(uint32_t position, uint32_t entries) { return (position / entries + 1) & 1; }

// Byte offsets inside one queue pair.
struct QueuePairLayout {
  uint64_t scheduler_words, sq, cq, arena, bytes;
};
BLINK_FN uint64_t align_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }
BLINK_FN QueuePairLayout queue_pair_layout(const Geometry& g) {
  QueuePairLayout l{};
  l.scheduler_words = sizeof(FrontendWords);
  l.sq = l.scheduler_words + sizeof(SchedulerWords);
  l.cq = l.sq + uint64_t(g.sq_entries) * sizeof(Sqe);
  l.arena = align_up(l.cq + uint64_t(g.cq_entries) * sizeof(Cqe), 64);
  l.bytes = align_up(l.arena + g.arena_bytes, 4096);
  return l;
}

}  // namespace blink
