// SPDX-License-Identifier: Apache-2.0
// The gate of an MLP on a CPU.
#pragma once

#include <cstring>

#include "cpu/cells.h"
#include "cpu/thread_pool.h"

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

BLINK_INLINE void gate_lanes(const float* gate, const float* up, float* out) {
  CellLanes own, other, power;
  std::memcpy(&own, gate, sizeof own);
  std::memcpy(&other, up, sizeof other);
  power = -own;
  exponentiate(power);
  own = own / (power + 1.0f) * other;
  std::memcpy(out, &own, sizeof own);
}

// out [size] = silu(gate) * up of gate_up [2 * size].
BLINK_CLONES inline void gate_row(const float* gate_up, uint32_t size, float* out) {
  uint32_t i = 0;
  for (; i + kCellLanes <= size; i += kCellLanes) gate_lanes(gate_up + i, gate_up + size + i, out + i);
  if (i == size) return;
  float rest[3][kCellLanes] = {};
  std::memcpy(rest[0], gate_up + i, (size - i) * sizeof(float));
  std::memcpy(rest[1], gate_up + size + i, (size - i) * sizeof(float));
  gate_lanes(rest[0], rest[1], rest[2]);
  std::memcpy(out + i, rest[2], (size - i) * sizeof(float));
}

// The same of rows.
inline void gate_rows(const float* gate_up, uint32_t rows, uint32_t size, float* out, ThreadPool& pool) {
  pool.share(rows, [&](uint64_t row) { gate_row(gate_up + row * 2 * size, size, out + row * size); });
}

}  // namespace blink
