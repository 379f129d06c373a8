// SPDX-License-Identifier: Apache-2.0
// Where a thread is in a ring of slots.
#pragma once

#include "ptx.cuh"

namespace blink {

// A place in a ring, and the parity of its phase.
template <int kSlots>
struct RingPlace {
  int slot = 0;
  unsigned parity = 0;

  __device__ void advance() {
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }
};

}  // namespace blink
