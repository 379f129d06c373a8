// SPDX-License-Identifier: Apache-2.0
// GEMMs of x in 8-bit integers: 32 values of a row share a scale, which is their largest magnitude by 127.
#pragma once

#include <cstring>
#include <vector>

#include "cpu/cells.h"
#include "cpu/gguf/product.h"

namespace blink {

constexpr uint32_t kInt8Group = 32;      // values of a scale
constexpr uint64_t kInt8Tile = 16;       // rows of a weight that the kernels take at a time
constexpr uint32_t kSharedRounding = 8;  // rows of x from which on threads share its rounding

enum class Int8Isa : uint32_t { kBest, kPlain, kVnni };

// Null if this machine or this build lacks it; the best one is never the reference.
inline MultiplyInt8 find_int8_kernel(Int8Isa isa) {
  return isa == Int8Isa::kPlain ? plain_int8_kernel() : vnni_int8_kernel();
}

typedef float Int8Floats __attribute__((vector_size(64), aligned(4)));
typedef int32_t Int8Words __attribute__((vector_size(64)));
typedef int8_t Int8Bytes __attribute__((vector_size(16), aligned(1)));

BLINK_INLINE int32_t sum_words(const Int8Words& words) {
  int32_t sum = 0;
  for (uint32_t i = 0; i < 16; ++i) sum += words[i];
  return sum;
}

// Round 32 values; what is no number makes the scale none.
BLINK_INLINE void round_group(const float* x, int8_t* quants, float* scale, float* sums) {
  constexpr float kToWhole = 0x1.8p23f;  // added to a small number, which is then whole and in the lowest bits
  const auto* values = reinterpret_cast<const Int8Floats*>(x);
  const Int8Words low = Int8Words(values[0]) & 0x7fffffff, high = Int8Words(values[1]) & 0x7fffffff;
  const Int8Words larger = low > high ? low : high;
  int32_t bits = 0;
  for (uint32_t i = 0; i < 16; ++i) bits = bits > larger[i] ? bits : larger[i];
  float most;
  std::memcpy(&most, &bits, sizeof most);
  const float factor = most > 0x1p-100f ? 127 / most : 0;
  *scale = most / 127;
  for (uint32_t i = 0; i < 2; ++i) {
    const Int8Words whole = (Int8Words(values[i] * factor + kToWhole) << 24) >> 24;
    reinterpret_cast<Int8Bytes*>(quants)[i] = __builtin_convertvector(whole, Int8Bytes);
    sums[i] = float(sum_words(whole)) * *scale;
  }
}

BLINK_CLONES inline void round_to_int8(const float* x, uint32_t count, int8_t* quants, float* scales, float* sums) {
  for (uint32_t i = 0; i < count / kInt8Group; ++i)
    round_group(x + i * kInt8Group, quants + i * kInt8Group, scales + i, sums + 2 * i);
}

// As multiply() of product.h does, with x rounded to 8 bits, once for all threads.
inline void multiply_int8(MultiplyInt8 kernel, const GgufWeight& weight, const float* x, uint32_t x_rows, float* out,
                          ThreadPool& pool) {
  const uint64_t columns = weight.columns, groups = columns / kInt8Group;
  std::vector<int8_t> quants(x_rows * columns);
  std::vector<float> scales(x_rows * groups * 3);
  float* sums = scales.data() + x_rows * groups;
  const auto round_row = [&](uint64_t row) {
    round_to_int8(x + row * columns, uint32_t(columns), quants.data() + row * columns, scales.data() + row * groups,
                  sums + 2 * row * groups);
  };
  if (x_rows < kSharedRounding)
    for (uint32_t row = 0; row < x_rows; ++row) round_row(row);
  else
    pool.share(x_rows, round_row);
  const uint64_t rows = count_rows(weight);
  share_rows(weight, pool, kInt8Tile, [&](const GgufRows& part, uint64_t first) {
    kernel({part, uint32_t(columns), x_rows, {quants.data(), scales.data(), sums}, out + first, rows});
  });
}

}  // namespace blink
