// SPDX-License-Identifier: Apache-2.0
// Small float32 operations of the model on a CPU. Between two GEMMs the caches are full of weights. Each of the ten
// library calls that one of these would take misses them. With one row, the calls cost more than the arithmetic.
#pragma once

#include <cmath>
#include <cstring>

#include "cpu/cells.h"
#include "region/platform.h"

namespace blink {

BLINK_INLINE void store_floats(float* to, const CellLanes& from) { std::memcpy(to, &from, sizeof from); }

// residual (may be null) += x; out = normalised residual or x, times weight; all [size]. out may be x.
BLINK_CLONES inline void rms_norm_row(float* out, const float* x, float* residual, const float* weight, uint32_t size,
                                      float eps) {
  const uint32_t whole = size - size % kCellLanes;
  const float* values = residual == nullptr ? x : residual;
  CellLanes sums = {}, own, other;
  for (uint32_t i = 0; i < whole; i += kCellLanes) {
    load_cells(x + i, own);
    if (residual != nullptr) {
      load_cells(residual + i, other);
      own += other;
      store_floats(residual + i, own);
    }
    sums += own * own;
  }
  float total = 0;
  for (uint32_t i = 0; i < kCellLanes; ++i) total += sums[i];
  for (uint32_t i = whole; i < size; ++i) {
    if (residual != nullptr) residual[i] += x[i];
    total += values[i] * values[i];
  }
  const float scale = 1 / std::sqrt(total / float(size) + eps);
  for (uint32_t i = 0; i < whole; i += kCellLanes) {
    load_cells(values + i, own);
    load_cells(weight + i, other);
    store_floats(out + i, own * scale * other);
  }
  for (uint32_t i = whole; i < size; ++i) out[i] = values[i] * scale * weight[i];
}

// The same of rows.
inline void rms_norm(float* out, const float* x, float* residual, const float* weight, uint32_t rows, uint32_t size,
                     float eps) {
  for (uint64_t at = 0; at < uint64_t(rows) * size; at += size)
    rms_norm_row(out + at, x + at, residual == nullptr ? nullptr : residual + at, weight, size, eps);
}

// Rotate one head's first 2 * half numbers.
BLINK_CLONES inline void rotate_head(float* head, const float* cosines, const float* sines, uint32_t half) {
  uint32_t i = 0;
  for (; i + kCellLanes <= half; i += kCellLanes) {
    CellLanes low, high, cosine, sine;
    load_cells(head + i, low);
    load_cells(head + half + i, high);
    load_cells(cosines + i, cosine);
    load_cells(sines + i, sine);
    store_floats(head + i, low * cosine - high * sine);
    store_floats(head + half + i, high * cosine + low * sine);
  }
  for (; i < half; ++i) {
    const float low = head[i], high = head[i + half];
    head[i] = low * cosines[i] - high * sines[i];
    head[i + half] = high * cosines[i] + low * sines[i];
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
      rotate_head(qkv, cosines, sines, half);
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
