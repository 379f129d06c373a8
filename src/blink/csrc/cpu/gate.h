// SPDX-License-Identifier: Apache-2.0
// The gate of an MLP on a CPU.
#pragma once

#include <cstring>

#include "cpu/exponential.h"
#include "cpu/thread_pool.h"

namespace blink {

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
