// SPDX-License-Identifier: Apache-2.0
// The exponential function of vectors on a CPU.
#pragma once

#include <cstring>

#include "cpu/cells.h"

namespace blink {

// e to the power of each, within 2 units in the last place (S. Moshier's expf of Cephes); beyond what a float holds,
// the nearest that it does. What is no number stays none.
BLINK_INLINE void exponentiate(CellLanes& x) {
  constexpr float kMost = 88.37f, kLeast = -87.33f, kToWhole = 0x1.8p23f;
  x = x > kMost ? CellLanes{} + kMost : x;
  x = x < kLeast ? CellLanes{} + kLeast : x;
  const CellLanes whole = (x * 1.44269504f + kToWhole) - kToWhole;
  const CellLanes rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  CellLanes sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * (rest * rest) + rest + 1.0f;
  const CellInts power = (__builtin_convertvector(whole, CellInts) + 127) << 23;
  CellLanes scale;
  std::memcpy(&scale, &power, sizeof scale);
  x = sum * scale;
}

}  // namespace blink
