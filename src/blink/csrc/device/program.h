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
  FIELD(StepGraphs*, graphs);      // by the indices of Geometry::graphs
  FIELD(uint32_t, parity);         // which of the two is next
  FIELD(uint32_t, windows);        // that have ended
  FIELD(uint32_t, idle_sleep_ns);  // between two looks of an idle scheduler; CUDA sleeps up to twice that
};

}  // namespace blink
