// SPDX-License-Identifier: Apache-2.0
// The host's program for the resident scheduler: its state and the executables that it launches.
#pragma once

#include "scheduler/state.h"

struct CUgraphExec_st;  // CUDA's; a cudaGraphExec_t points to one

namespace blink {

constexpr uint32_t kDeviceLanes = 256;
constexpr uint32_t kLaunchesPerWindow = 110;  // CUDA allows 120 before the kernel must launch itself anew

// The executables of one size of step: two of it whole, as one cannot be launched while it runs, and one for each of
// its segments, which are never launched twice in a row.
struct StepGraphs {
  FIELDS_OF(StepGraphs);
  FIELD_ARRAY(CUgraphExec_st*, whole, 2);
  FIELD(CUgraphExec_st**, segments);  // null: it is not cut
};

struct DeviceProgram {
  FIELDS_OF(DeviceProgram);
  FIELD(State*, state);
  FIELD(StepGraphs*, graphs);               // by the indices of Geometry::graphs
  FIELD(uint32_t, parity);                  // which of the two is next
  FIELD(uint32_t, windows);                 // that have ended
  FIELD(uint32_t, idle_sleep_ns);           // between two looks of an idle scheduler; CUDA sleeps up to twice that
  FIELD(uint32_t, num_followers);           // ranks on other GPUs that launch what this one does
  FIELD(uint64_t**, plan_words);            // [num_followers], each in its GPU's memory
  FIELD_ARRAY(CUgraphExec_st*, copies, 2);  // in turn: the one before may not have ended as its copy is done
};

// What a rank that is not the first launches by.
struct FollowerProgram {
  FIELDS_OF(FollowerProgram);
  FIELD(uint64_t*, plan_word);           // in this GPU's memory; writer: the first rank's scheduler
  FIELD(StepGraphs*, graphs);            // by the indices of Geometry::graphs
  FIELD_ARRAY(StepOutput*, outputs, 2);  // by StepKind: where this GPU's graphs say that they are done
  FIELD(uint32_t, step);                 // launched last, its lower half
  FIELD(uint32_t, parity);               // which of two executables is next
  FIELD(uint32_t, failed);               // status of what failed, a cudaError
};

}  // namespace blink
