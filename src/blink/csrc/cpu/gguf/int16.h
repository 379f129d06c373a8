// SPDX-License-Identifier: Apache-2.0
// GEMMs of x in integers of 16 bits, as two of 8: 32 values of a row share a scale.
#pragma once

#include <cstring>
#include <vector>

#include "cpu/cells.h"
#include "cpu/gguf/product.h"

namespace blink {

constexpr uint32_t kInt16Group = 32;     // values of a scale
constexpr uint64_t kInt16Tile = 16;      // rows of a weight that the kernels take at a time
constexpr uint32_t kMostTogether = 8;    // rows of x whose sums a kernel keeps in registers
constexpr uint32_t kSharedRounding = 8;  // rows of x from which on threads share its rounding

enum class Int16Isa : uint32_t { kBest, kPlain, kVnni };

// Null if this machine or this build lacks it; the best one is never the reference.
inline MultiplyInt16 find_int16_kernel(Int16Isa isa) {
  return isa == Int16Isa::kPlain ? plain_int16_kernel() : vnni_int16_kernel();
}

typedef float Int16Floats __attribute__((vector_size(64), aligned(4)));
typedef int32_t Int16Words __attribute__((vector_size(64)));
typedef int8_t Int16Bytes __attribute__((vector_size(16), aligned(1)));

BLINK_INLINE int32_t sum_words(const Int16Words& words) {
  int32_t sum = 0;
  for (uint32_t i = 0; i < 16; ++i) sum += words[i];
  return sum;
}

// Round 32 values; what is no number makes the scale none.
BLINK_INLINE void round_group(const float* x, int8_t* quants, float* scale, float* sums) {
  constexpr float kLargest = 127 * 256;
  constexpr float kToWhole = 0x1.8p23f;  // added to a small number, which is then whole and in the lowest bits
  const auto* values = reinterpret_cast<const Int16Floats*>(x);
  const Int16Words first = Int16Words(values[0]) & 0x7fffffff, second = Int16Words(values[1]) & 0x7fffffff;
  const Int16Words larger = first > second ? first : second;
  int32_t bits = 0;
  for (uint32_t i = 0; i < 16; ++i) bits = bits > larger[i] ? bits : larger[i];
  float most;
  std::memcpy(&most, &bits, sizeof most);
  const float factor = most > 0x1p-100f ? kLargest / most : 0;
  *scale = most / kLargest;
  for (uint32_t i = 0; i < 2; ++i) {
    const Int16Words whole = (Int16Words(values[i] * factor + kToWhole) << 16) >> 16;
    const Int16Words low = (whole << 24) >> 24;
    auto* halves = reinterpret_cast<Int16Bytes*>(quants);
    halves[i] = __builtin_convertvector((whole - low) >> 8, Int16Bytes);
    halves[2 + i] = __builtin_convertvector(low, Int16Bytes);
    sums[i] = float(sum_words(whole)) * *scale;
  }
}

// Round a row whose groups lie `apart` from each other.
BLINK_CLONES inline void round_to_int16(const float* x, uint32_t count, uint32_t apart, int8_t* quants, float* scales,
                                        float* sums) {
  for (uint64_t i = 0, at = 0; i < count / kInt16Group; ++i, at += apart)
    round_group(x + i * kInt16Group, quants + 2 * at * kInt16Group, scales + at, sums + 2 * at);
}

// As multiply() of product.h does, with x rounded to 16 bits, once for all threads.
inline void multiply_int16(MultiplyInt16 kernel, const GgufWeight& weight, const float* x, uint32_t x_rows, float* out,
                           ThreadPool& pool) {
  const uint64_t columns = weight.columns, groups = columns / kInt16Group;
  const uint32_t together = rows_together(x_rows, kMostTogether);
  const uint64_t rounded = (x_rows + together - 1) / together * together;
  std::vector<int8_t> quants(2 * rounded * columns);
  std::vector<float> scales(rounded * groups * 3);
  float* sums = scales.data() + rounded * groups;
  const Int16Rows rows{quants.data(), scales.data(), sums, together};
  const auto round_row = [&](uint64_t row) {
    const uint64_t first = rows.place(row, 0, groups);
    round_to_int16(x + row * columns, uint32_t(columns), together, quants.data() + 2 * first * kInt16Group,
                   scales.data() + first, sums + 2 * first);
  };
  if (x_rows < kSharedRounding)
    for (uint32_t row = 0; row < x_rows; ++row) round_row(row);
  else
    pool.share(x_rows, round_row);
  const uint64_t outputs = count_rows(weight);
  share_rows(weight, pool, kInt16Tile, [&](const GgufRows& part, uint64_t first) {
    kernel({part, uint32_t(columns), x_rows, rows, out + first, outputs});
  });
}

}  // namespace blink
