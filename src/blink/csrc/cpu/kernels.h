// SPDX-License-Identifier: Apache-2.0
// Small float32 operations of the model on a CPU. Between two GEMMs the caches are full of weights. Each of the ten
// library calls that one of these would take misses them. With one row, the calls cost more than the arithmetic.
#pragma once

#include <cmath>
#include <cstring>

#include "cpu/cells.h"
#include "region/platform.h"

namespace blink {

// residual (may be null) += x; out = normalised residual or x, times weight; all [rows, size].
inline void rms_norm(float* out, const float* x, float* residual, const float* weight, uint32_t rows, uint32_t size,
                     float eps) {
  constexpr uint32_t kLanes = 16;  // independent sums, which the compiler keeps in vector registers
  for (uint32_t row = 0; row < rows; ++row, out += size, x += size) {
    const float* values = x;
    if (residual != nullptr) {
      for (uint32_t i = 0; i < size; ++i) residual[i] += x[i];
      values = residual;
      residual += size;
    }
    float sums[kLanes] = {};
    for (uint32_t i = 0; i + kLanes <= size; i += kLanes)
      for (uint32_t lane = 0; lane < kLanes; ++lane) sums[lane] += values[i + lane] * values[i + lane];
    float total = 0;
    for (const float sum : sums) total += sum;
    for (uint32_t i = size - size % kLanes; i < size; ++i) total += values[i] * values[i];
    const float scale = 1 / std::sqrt(total / float(size) + eps);
    for (uint32_t i = 0; i < size; ++i) out[i] = values[i] * scale * weight[i];
  }
}

struct RotaryShape {
  uint32_t tokens, query_heads, kv_heads, head_dim, rotary_dim;
};

// The weights [head_dim] of the norms of each query head and each key head; null without such norms.
struct HeadNorms {
  const float *query, *key;
  float eps;
};

// Normalise the queries and keys, if there are norms of them, and rotate them of qkv [tokens, query_heads + 2 *
// kv_heads, head_dim] in place; copy keys and values to their slots of the caches [slots, kv_heads, head_dim]; slot -1
// writes nothing. rotation: [tokens, rotary_dim].
template <class Cell>
void rotate_and_store(float* qkv, const float* rotation, const int32_t* slots, Cell* keys, Cell* values,
                      RotaryShape shape, HeadNorms norms) {
  const uint32_t half = shape.rotary_dim / 2, kv_size = shape.kv_heads * shape.head_dim;
  for (uint32_t token = 0; token < shape.tokens; ++token, rotation += shape.rotary_dim) {
    const float* cosines = rotation;
    const float* sines = rotation + half;
    const uint32_t rotated = shape.query_heads + shape.kv_heads;
    for (uint32_t head = 0; head < rotated; ++head, qkv += shape.head_dim) {
      const float* norm = head < shape.query_heads ? norms.query : norms.key;
      if (norm != nullptr) rms_norm(qkv, qkv, nullptr, norm, 1, shape.head_dim, norms.eps);
      for (uint32_t i = 0; i < half; ++i) {
        const float low = qkv[i], high = qkv[i + half];
        qkv[i] = low * cosines[i] - high * sines[i];
        qkv[i + half] = high * cosines[i] + low * sines[i];
      }
    }
    if (slots[token] >= 0) {
      const uint64_t place = uint64_t(slots[token]) * kv_size;
      narrow_cells(keys + place, qkv - kv_size, kv_size);
      narrow_cells(values + place, qkv, kv_size);
    }
    qkv += kv_size;
  }
}

}  // namespace blink
