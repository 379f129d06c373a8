// SPDX-License-Identifier: Apache-2.0
// Where a thread is in a pipeline's slots.
#pragma once

#include "kernels/common/ptx.cuh"

namespace blink {

// A place in a pipeline, and the parity of its phase.
template <int kSlots>
struct PipelineState {
  int slot = 0;
  unsigned parity = 0;

  __device__ void advance() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
};

}  // namespace blink
