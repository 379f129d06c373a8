// SPDX-License-Identifier: Apache-2.0
// The enumerations of the region. Python makes its own of these (layout_table.h): their values are below 64.
#pragma once

#include "region/platform.h"

namespace blink {

enum class Opcode : uint32_t { kSubmit = 1, kCancel = 2, kResetPrefixCache = 3, kPause = 4, kResume = 5 };
// What becomes of sequences while nothing is launched (pause.h). kAbort: all end. kWait: those that run go on to their
// end first. kKeep: all stay as they are. kRetract: all stay, and compute their KV anew afterwards.
enum class PauseMode : uint32_t { kNone = 0, kAbort = 1, kWait = 2, kKeep = 3, kRetract = 4 };
// What an engine's model lacks; bits of Control::absent. kUndefined: an update of its weights has begun, and no whole
// one came. kDiscarded, with kWeights: they are to be read again.
enum class Absent : uint32_t { kNothing = 0, kWeights = 1, kKvCache = 2, kUndefined = 4, kDiscarded = 8 };
// What a pause takes away: cached prefixes, or those and every sequence's KV.
enum class Drop : uint32_t { kNothing = 0, kPrefixCache = 1, kKvCache = 2 };
enum class CqeKind : uint8_t {
  kAdmitted = 1,
  kToken = 2,
  kTopLogprob = 3,
  kFinished = 4,
  kRejected = 5,
  kPromptLogprob = 6,
  kVector = 7
};
enum class FinishReason : uint8_t { kNone = 0, kStop = 1, kLength = 2, kAbort = 3, kError = 4 };
// What the engine makes of prompts: text, an embedding, or a score.
enum class Task : uint32_t { kGenerate = 0, kEmbed = 1, kScore = 2 };
enum class ServiceClass : uint32_t { kLatencySensitive = 0, kBestEffort = 1 };
enum class EngineState : uint32_t {
  kBooting = 0,
  kReady = 1,
  kDraining = 2,
  kDrained = 3,
  kStopped = 4,
  kFailed = 5,
  kPaused = 6
};

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
  kBiasValue = 15,
  kAutomatonRange = 16,
  kAutomaton = 17,
  kTpotTarget = 18,
  kPooling = 19,
  kPrediction = 20,
  kAdapter = 21,
};

// Why the scheduler stopped; Control::error_code.
enum class ErrorCode : uint32_t {
  kNone = 0,
  kStepFailed = 1,         // the model reported a failure
  kSampledTokenRange = 2,  // the model wrote a token outside the vocabulary, and not kInvalidLogits
  kFreeListCorrupt = 3,
  kRefCountCorrupt = 4,
  kHashTableCorrupt = 5,
  kLaunchFailed = 6,
  kRankLost = 7,  // a rank of a tensor-parallel group failed or did not come; the detail is its number
};
constexpr uint32_t kFirstLostRank = 2;  // of StepOutput's `failed`

// What one pass of the scheduler did. kHeld: there is work, and pacing lets it wait. kAway: its host is to have the
// device until it starts the scheduler again.
enum class StepResult : uint32_t {
  kIdle = 0,
  kBusy = 1,
  kLaunched = 2,
  kStopped = 3,
  kFailed = 4,
  kHeld = 5,
  kAway = 6
};

// Whose sequences a step takes: all, the latency-sensitive and aged ones, or the others.
enum class StepClass : uint32_t { kAll = 0, kUrgent = 1, kBestEffort = 2 };

// Where a sequence stands in the scheduler.
enum class SequenceStatus : uint32_t { kFree = 0, kWaiting = 1, kRunning = 2 };

}  // namespace blink
