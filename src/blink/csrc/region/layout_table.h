// SPDX-License-Identifier: Apache-2.0
// The layout as data: one JSON text of every struct, enumeration and constant that Python uses, and its digest. Host
// only.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>
#include <type_traits>

#include "automaton/machine.h"
#include "cpu/constrain.h"
#include "cpu/json_weight.h"
#include "cpu/layer_args.h"
#include "cpu/sampler.h"
#include "device/program.h"
#include "kernels/args.h"
#include "kernels/comm_args.h"
#include "scheduler/failure.h"
#include "scheduler/step_kind.h"

namespace blink {

// Types as numpy names them; a struct by its own name.
template <class T>
std::string type_code() {
  using E = std::remove_all_extents_t<T>;
  const std::string count = std::is_array_v<T> ? "(" + std::to_string(sizeof(T) / sizeof(E)) + ",)" : "";
  if constexpr (std::is_same_v<E, char>)
    return "S" + std::to_string(sizeof(T));
  else if constexpr (std::is_class_v<E>)
    return count + E::struct_name;
  else if constexpr (std::is_floating_point_v<E>)
    return count + "f" + std::to_string(sizeof(E));
  else
    return count + (std::is_signed_v<E> ? "i" : "u") + std::to_string(sizeof(E));
}

// "blink::RejectCode::kTag" for that value, "(blink::RejectCode)63" for a value that has no name: what the compiler
// calls it.
template <auto kValue>
constexpr std::string_view enumerator() {
  constexpr std::string_view text = __PRETTY_FUNCTION__;
  constexpr size_t start = text.find("kValue = ") + 9;
  return text.substr(start, text.find_first_of(";]", start) - start);
}

class LayoutText {
 public:
  // A section of the text and, in it, everything that `list` adds.
  template <class List>
  void section(std::string_view name, List list) {
    open(name, '{');
    list();
    close('}');
  }

  template <class... Structs>
  void structs() {
    (one_struct<Structs>(), ...);
  }
  template <class... Enums>
  void enums() {
    (one_enum<Enums>(), ...);
  }
  void value(std::string_view name, int64_t value) { entry(name, std::to_string(value)); }
  // What a parameter is unless told, and its range.
  void range(std::string_view name, double usual, Low end, double low, double high) {
    char json[128];
    std::snprintf(json, sizeof(json), "[%.17g,%.17g,%.17g,%s]", usual, low, high, end == Low::kIn ? "true" : "false");
    entry(name, json);
  }
  std::string finish() { return "{" + text_ + "}"; }

  // Called by visit_fields().
  template <class F>
  void field(const char* name, size_t offset) {
    entry(name, "[\"" + type_code<F>() + "\"," + std::to_string(offset) + "]");
  }

 private:
  template <class S>
  void one_struct() {
    open(S::struct_name, '{');
    value("", sizeof(S));
    visit_fields<S>(*this);
    close('}');
  }

  template <class E, uint32_t N = 0>
  void one_enum() {
    constexpr std::string_view name = enumerator<E(N)>();
    constexpr size_t last = name.rfind("::");
    if constexpr (N == 0) open(type_name<E>(), '{');
    if constexpr (name[0] != '(') value(name.substr(last + 2), N);
    if constexpr (N < 63)
      one_enum<E, N + 1>();
    else
      close('}');
  }

  // The name without its namespace, taken from that of a value that has none.
  template <class E>
  static constexpr std::string_view type_name() {
    constexpr std::string_view cast = enumerator<E(63)>();
    static_assert(cast[0] == '(', "an enumeration's values are below 63");
    constexpr size_t start = cast.rfind("::") + 2;
    return cast.substr(start, cast.find(')') - start);
  }

  void entry(std::string_view name, std::string_view json) {
    if (!text_.empty() && text_.back() != '{') text_ += ',';
    text_.append("\"").append(name).append("\":").append(json);
  }
  void open(std::string_view name, char bracket) { entry(name, std::string(1, bracket)); }
  void close(char bracket) { text_ += bracket; }

  std::string text_;
};

inline void list_constants(LayoutText& t) {
#define CONSTANT(name) t.value(#name, int64_t(name))
  CONSTANT(kMagic);
  CONSTANT(kLayoutVersion);
  CONSTANT(kControlOffset);
  CONSTANT(kMaxGraphs);
  CONSTANT(kFlows);
  CONSTANT(kMaxStopTokens);
  CONSTANT(kInlineStopTokens);
  CONSTANT(kMaxLogitBiases);
  CONSTANT(kMaxLogitBias);
  CONSTANT(kMaxLogprobs);
  CONSTANT(kBlockHashBytes);
  CONSTANT(kValuesOfCqe);
  CONSTANT(kNoTpotTarget);
  CONSTANT(kMaxTpotTargetUs);
  CONSTANT(kRollbackTokens);
  CONSTANT(kMaxDrafts);
  CONSTANT(kMostNgram);
  CONSTANT(kAcceptedRank);
  CONSTANT(kPredictedBits);
  CONSTANT(kDeviceLanes);
  CONSTANT(kLaunchesPerWindow);
  CONSTANT(kInvalidLogits);
  CONSTANT(kGrammarDone);
  CONSTANT(kFirstLostRank);
  CONSTANT(kMaxAutomatonBytes);
  CONSTANT(kMaxAutomata);
  CONSTANT(kAutomatonUnit);
  CONSTANT(kListsOfSlot);
  CONSTANT(kAutomatonHashBytes);
  CONSTANT(kMaxAutomatonDepth);
  CONSTANT(kMaxTokenPushes);
  CONSTANT(kMaxNeed);
  CONSTANT(kMaxUniqueItems);
  CONSTANT(kMaxTokenItems);
  CONSTANT(kTrail);
  CONSTANT(kMaxByteMoves);
  CONSTANT(kMaxAutomatonStates);
  CONSTANT(kMaxAutomatonCalls);
  CONSTANT(kSpecialTokenByte);
#undef CONSTANT
}

inline const std::string& layout_text() {
  static const std::string text = [] {
    LayoutText t;
    t.section("structs", [&] {
      t.structs<GraphSize, Geometry, Header, Statistics, Control, TraceEntry>();
      t.structs<FrontendWords, SchedulerWords, Sampling, Sqe, CqeTag, Cqe, VectorCqe, QueuePairLayout, AdapterWords>();
      t.structs<SlotParams, Row, BatchHeader, StepOutput, StepBuffers, DecisionLogEntry, GraphCost, MeasuredCost,
                Account>();
      t.structs<AutomatonHeader, AutomatonCall, AutomatonPlace, AutomatonEntry, AdapterUse, CopyOrder, TokenEntry,
                AnswerToken, HeadDraft>();
      t.structs<KvEvent, KvEventWords, KvEventLayout, BlockLink, EventLog, HostCopy, HostTier>();
      t.structs<Registration, OriginRecord, Spacing, Drafting, Sequence, Flow, QueuePairState, NextRow, State, Place,
                StepGraphs, DeviceProgram>();
      t.structs<TensorMap, EmbedArgs, OutputArgs, GemmArgs, ShrinkArgs, UpdateArgs, UpdatedGemmArgs, GemvArgs>();
      t.structs<GroupedArgs, PermutationArgs, RoutingArgs>();
      t.structs<MoeGateArgs, MoeDownArgs, AttentionArgs, SampleArgs, PrefillGemmArgs, GateUpArgs, PromptArgs>();
      t.structs<DeltaDecodeArgs, InvertArgs, ConstrainArgs, ConstrainedRow, SampledRows, Graph, JsonWeight>();
      t.structs<DenseLayer, KeyGroup, DenseStep>();
      t.structs<RankArgs, AllReduceArgs, TwoShotArgs, JoinArgs, EndStepArgs, PullArgs, FollowerProgram>();
    });
    t.section("enums", [&] {
      t.enums<Opcode, PauseMode, Drop, Absent, CqeKind, Task, FinishReason, ServiceClass, EngineState, RejectCode,
              ErrorCode, KvEventKind>();
      t.enums<StepResult, StepClass, SequenceStatus, RowKind, StepKind>();
    });
    t.section("constants", [&] { list_constants(t); });
    t.section("sampling", [&] {
#define LIST_RANGE(type, name, usual, low_end, low, high, meaning) t.range(#name, usual, low_end, low, high);
      SAMPLING_PARAMS(LIST_RANGE)
#undef LIST_RANGE
    });
    t.section("files", [&] {
      uint32_t index = 0;
      for (const char* file : kFailureFiles) t.value(file, index++);
    });
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
