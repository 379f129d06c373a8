// SPDX-License-Identifier: Apache-2.0
// The layout as data: one JSON text of every shared struct, enum and constant, and its digest. Host only.
#pragma once

#include <string>
#include <type_traits>

#include "scheduler/state.h"

namespace blink {

template <class T>
std::string type_code() {
  using E = std::remove_all_extents_t<T>;
  const std::string count = std::is_array_v<T> ? "(" + std::to_string(sizeof(T) / sizeof(E)) + ",)" : "";
  if constexpr (std::is_same_v<E, char>)
    return "S" + std::to_string(sizeof(T));
  else if constexpr (std::is_enum_v<E>)
    return count + "u" + std::to_string(sizeof(E));
  else if constexpr (std::is_class_v<E>)
    return "struct";
  else if constexpr (std::is_floating_point_v<E>)
    return count + "f" + std::to_string(sizeof(E));
  else
    return count + (std::is_signed_v<E> ? "i" : "u") + std::to_string(sizeof(E));
}

class LayoutText {
 public:
  template <class T>
  void open_struct(const char* name) {
    text_ += std::string(text_.empty() ? "{" : ",") + "\"" + name + "\":{\"bytes\":" + std::to_string(sizeof(T)) +
             ",\"fields\":[";
    first_ = true;
  }
  template <class F>
  void field(const char* name, size_t offset) {
    text_ +=
        std::string(first_ ? "" : ",") + "[\"" + name + "\",\"" + type_code<F>() + "\"," + std::to_string(offset) + "]";
    first_ = false;
  }
  void close_struct() { text_ += "]}"; }
  void open_values(const char* name) {
    text_ += std::string(",\"") + name + "\":{";
    first_ = true;
  }
  void value(const char* name, uint64_t value) {
    text_ += std::string(first_ ? "" : ",") + "\"" + name + "\":" + std::to_string(value);
    first_ = false;
  }
  void close_values() { text_ += "}"; }
  std::string finish() { return text_ + "}"; }

 private:
  std::string text_;
  bool first_ = true;
};

#define FIELD(S, f) t.field<decltype(S::f)>(#f, offsetof(S, f))
#define VALUE(E, v) t.value(#v, uint64_t(E::v))

inline void list_region_structs(LayoutText& t) {
  t.open_struct<Geometry>("Geometry");
  FIELD(Geometry, num_queue_pairs), FIELD(Geometry, sq_entries), FIELD(Geometry, cq_entries),
      FIELD(Geometry, arena_bytes);
  FIELD(Geometry, sequences_per_queue_pair), FIELD(Geometry, max_num_seqs), FIELD(Geometry, num_slots);
  FIELD(Geometry, max_model_len), FIELD(Geometry, block_size), FIELD(Geometry, num_blocks), FIELD(Geometry, max_blocks);
  FIELD(Geometry, max_num_batched_tokens), FIELD(Geometry, vocab_size), FIELD(Geometry, prefix_caching);
  FIELD(Geometry, priority_policy), FIELD(Geometry, trace_entries), FIELD(Geometry, hash_entries),
      FIELD(Geometry, lru_entries);
  FIELD(Geometry, log_entries), FIELD(Geometry, num_decode_buckets), FIELD(Geometry, num_mixed_buckets);
  FIELD(Geometry, lease_timeout_ns), FIELD(Geometry, max_queue_age_ns), FIELD(Geometry, decode_buckets);
  FIELD(Geometry, mixed_buckets);
  t.close_struct();
  t.open_struct<Header>("Header");
  FIELD(Header, magic), FIELD(Header, digest), FIELD(Header, epoch), FIELD(Header, region_bytes),
      FIELD(Header, version);
  FIELD(Header, trace_offset), FIELD(Header, queue_pairs_offset), FIELD(Header, queue_pair_bytes),
      FIELD(Header, hash_key);
  FIELD(Header, model), FIELD(Header, geometry);
  t.close_struct();
  t.open_struct<Statistics>("Statistics");
  FIELD(Statistics, num_steps), FIELD(Statistics, decode_launches), FIELD(Statistics, mixed_launches);
  FIELD(Statistics, computed_tokens), FIELD(Statistics, padded_tokens), FIELD(Statistics, prompt_tokens),
      FIELD(Statistics, generation_tokens);
  FIELD(Statistics, prefix_queries), FIELD(Statistics, prefix_hits), FIELD(Statistics, num_preemptions);
  FIELD(Statistics, num_parked), FIELD(Statistics, evicted_blocks), FIELD(Statistics, finished_stop);
  FIELD(Statistics, finished_length), FIELD(Statistics, finished_abort), FIELD(Statistics, num_rejected);
  FIELD(Statistics, expired_leases), FIELD(Statistics, num_running), FIELD(Statistics, num_waiting);
  FIELD(Statistics, num_blocks), FIELD(Statistics, num_blocks_used), FIELD(Statistics, num_blocks_cached);
  t.close_struct();
  t.open_struct<Control>("Control");
  FIELD(Control, heartbeat), FIELD(Control, state), FIELD(Control, error_code), FIELD(Control, error_place);
  FIELD(Control, error_detail), FIELD(Control, drain), FIELD(Control, stop), FIELD(Control, statistics);
  t.close_struct();
  t.open_struct<TraceEntry>("TraceEntry");
  FIELD(TraceEntry, step), FIELD(TraceEntry, retired_ns), FIELD(TraceEntry, launched_ns), FIELD(TraceEntry, graph);
  FIELD(TraceEntry, num_rows), FIELD(TraceEntry, num_tokens), FIELD(TraceEntry, num_decode_rows);
  FIELD(TraceEntry, num_running), FIELD(TraceEntry, num_waiting), FIELD(TraceEntry, num_free_blocks);
  FIELD(TraceEntry, num_admitted), FIELD(TraceEntry, num_preempted), FIELD(TraceEntry, idle_before);
  t.close_struct();
}

inline void list_queue_pair_structs(LayoutText& t) {
  t.open_struct<FrontendWords>("FrontendWords");
  FIELD(FrontendWords, sq_tail), FIELD(FrontendWords, cq_head), FIELD(FrontendWords, lease),
      FIELD(FrontendWords, attach);
  t.close_struct();
  t.open_struct<SchedulerWords>("SchedulerWords");
  FIELD(SchedulerWords, sq_head), FIELD(SchedulerWords, attached), FIELD(SchedulerWords, cq_tail);
  t.close_struct();
  t.open_struct<Sqe>("Sqe");
  FIELD(Sqe, opcode), FIELD(Sqe, service_class), FIELD(Sqe, sequence), FIELD(Sqe, seed), FIELD(Sqe, prompt_offset);
  FIELD(Sqe, num_prompt_tokens), FIELD(Sqe, hashes_offset), FIELD(Sqe, num_hashes), FIELD(Sqe, more_stop_offset);
  FIELD(Sqe, num_stop_tokens), FIELD(Sqe, bias_offset), FIELD(Sqe, num_biases), FIELD(Sqe, stop_tokens);
  FIELD(Sqe, temperature), FIELD(Sqe, top_p), FIELD(Sqe, min_p), FIELD(Sqe, repetition_penalty);
  FIELD(Sqe, presence_penalty), FIELD(Sqe, frequency_penalty), FIELD(Sqe, top_k), FIELD(Sqe, num_logprobs);
  FIELD(Sqe, max_tokens), FIELD(Sqe, min_tokens), FIELD(Sqe, priority);
  t.close_struct();
  t.open_struct<Cqe>("Cqe");
  FIELD(Cqe, sequence), FIELD(Cqe, time_ns), FIELD(Cqe, token), FIELD(Cqe, logprob), FIELD(Cqe, index), FIELD(Cqe, tag);
  t.close_struct();
}

inline void list_state_structs(LayoutText& t) {
  t.open_struct<SlotParams>("SlotParams");
  FIELD(SlotParams, temperature), FIELD(SlotParams, top_p), FIELD(SlotParams, min_p),
      FIELD(SlotParams, repetition_penalty);
  FIELD(SlotParams, presence_penalty), FIELD(SlotParams, frequency_penalty), FIELD(SlotParams, top_k);
  FIELD(SlotParams, seed_low), FIELD(SlotParams, seed_high), FIELD(SlotParams, num_logprobs);
  FIELD(SlotParams, num_prompt_tokens), FIELD(SlotParams, min_tokens), FIELD(SlotParams, num_stop_tokens);
  FIELD(SlotParams, num_biases);
  t.close_struct();
  t.open_struct<BatchHeader>("BatchHeader");
  FIELD(BatchHeader, num_rows), FIELD(BatchHeader, num_tokens), FIELD(BatchHeader, num_decode_rows),
      FIELD(BatchHeader, graph);
  FIELD(BatchHeader, step);
  t.close_struct();
  t.open_struct<StepOutput>("StepOutput");
  FIELD(StepOutput, done_step), FIELD(StepOutput, failed);
  t.close_struct();
  t.open_struct<DecisionLogEntry>("DecisionLogEntry");
  FIELD(DecisionLogEntry, step), FIELD(DecisionLogEntry, row), FIELD(DecisionLogEntry, sequence),
      FIELD(DecisionLogEntry, slot);
  FIELD(DecisionLogEntry, num_computed), FIELD(DecisionLogEntry, scheduled), FIELD(DecisionLogEntry, last_block);
  FIELD(DecisionLogEntry, graph);
  t.close_struct();
  t.open_struct<Sequence>("Sequence");
  FIELD(Sequence, status), FIELD(Sequence, queue_pair), FIELD(Sequence, slot), FIELD(Sequence, cancelled);
  FIELD(Sequence, finish), FIELD(Sequence, admitted), FIELD(Sequence, num_tokens), FIELD(Sequence, num_computed);
  FIELD(Sequence, num_generated), FIELD(Sequence, num_blocks), FIELD(Sequence, num_registered),
      FIELD(Sequence, scheduled);
  FIELD(Sequence, arrival), FIELD(Sequence, queued_ns), FIELD(Sequence, waited_ns);
  t.close_struct();
}

inline void list_values(LayoutText& t) {
  t.open_values("Opcode");
  VALUE(Opcode, kSubmit), VALUE(Opcode, kCancel);
  t.close_values(), t.open_values("CqeKind");
  VALUE(CqeKind, kAdmitted), VALUE(CqeKind, kToken), VALUE(CqeKind, kTopLogprob), VALUE(CqeKind, kFinished);
  VALUE(CqeKind, kRejected);
  t.close_values(), t.open_values("FinishReason");
  VALUE(FinishReason, kNone), VALUE(FinishReason, kStop), VALUE(FinishReason, kLength), VALUE(FinishReason, kAbort);
  VALUE(FinishReason, kError);
  t.close_values(), t.open_values("EngineState");
  VALUE(EngineState, kBooting), VALUE(EngineState, kReady), VALUE(EngineState, kDraining), VALUE(EngineState, kDrained);
  VALUE(EngineState, kStopped), VALUE(EngineState, kFailed);
  t.close_values(), t.open_values("RejectCode");
  VALUE(RejectCode, kNone), VALUE(RejectCode, kOpcode), VALUE(RejectCode, kTag), VALUE(RejectCode, kTagBusy);
  VALUE(RejectCode, kUnknownSequence), VALUE(RejectCode, kPromptLength), VALUE(RejectCode, kPromptRange);
  VALUE(RejectCode, kPromptToken), VALUE(RejectCode, kStopTokens), VALUE(RejectCode, kLogitBias),
      VALUE(RejectCode, kHashes);
  VALUE(RejectCode, kSamplingValue), VALUE(RejectCode, kMaxTokens), VALUE(RejectCode, kServiceClass);
  VALUE(RejectCode, kDraining);
  t.close_values(), t.open_values("ErrorCode");
  VALUE(ErrorCode, kNone), VALUE(ErrorCode, kStepFailed), VALUE(ErrorCode, kSampledTokenRange);
  VALUE(ErrorCode, kFreeListCorrupt), VALUE(ErrorCode, kRefCountCorrupt), VALUE(ErrorCode, kHashTableCorrupt);
  VALUE(ErrorCode, kLaunchFailed);
  t.close_values(), t.open_values("constants");
  t.value("magic", kMagic), t.value("layout_version", kLayoutVersion), t.value("max_queue_pairs", kMaxQueuePairs);
  t.value("max_buckets", kMaxBuckets), t.value("max_stop_tokens", kMaxStopTokens);
  t.value("inline_stop_tokens", kInlineStopTokens), t.value("max_logit_biases", kMaxLogitBiases);
  t.value("max_logprobs", kMaxLogprobs), t.value("control_offset", align_up(sizeof(Header), 64));
  t.close_values();
}
#undef FIELD
#undef VALUE

inline const std::string& layout_text() {
  static const std::string text = [] {
    LayoutText t;
    list_region_structs(t);
    list_queue_pair_structs(t);
    list_state_structs(t);
    list_values(t);
    return t.finish();
  }();
  return text;
}

// FNV-1a of the layout text: equal digests mean equal offsets, types and codes.
inline uint64_t layout_digest() {
  uint64_t digest = 0xcbf29ce484222325ull;
  for (const char c : layout_text()) digest = (digest ^ uint8_t(c)) * 0x100000001b3ull;
  return digest;
}

}  // namespace blink
