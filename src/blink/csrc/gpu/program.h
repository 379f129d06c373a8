// SPDX-License-Identifier: Apache-2.0
// What the host prepares for the resident scheduler, and how that is launched.
#pragma once

#include "scheduler/state.h"

struct CUgraphExec_st;  // CUDA's; a cudaGraphExec_t points to one

namespace blink {

constexpr uint32_t kDeviceLanes = 256;
constexpr uint32_t kLaunchesPerWindow = 110;  // CUDA allows 120 before the kernel must launch itself anew

// Two executables of one graph, as one cannot be launched while it runs.
struct GraphPair {
  FIELDS_OF(GraphPair);
  FIELD_ARRAY(CUgraphExec_st*, executables, 2);
};

struct DeviceProgram {
  FIELDS_OF(DeviceProgram);
  FIELD(State*, state);
  FIELD(GraphPair*, graphs);       // by the indices of Geometry::graphs
  FIELD(uint32_t, parity);         // which of the two is next
  FIELD(uint32_t, windows);        // that have ended
  FIELD(uint32_t, idle_sleep_ns);  // between two looks of an idle scheduler; CUDA sleeps up to twice that
};

}  // namespace blink
