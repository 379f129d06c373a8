// SPDX-License-Identifier: Apache-2.0
// GEMMs of prompts in bfloat16 where the processor multiplies that faster: x is rounded once, for all threads.
#pragma once

#include <cstring>
#include <vector>

#include "cpu/cells.h"
#include "cpu/gguf/product.h"

namespace blink {

constexpr uint32_t kBf16Rows = 32;  // of x and of a weight, that the kernels take at a time

inline uint16_t round_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float widen_bf16(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

enum class Bf16Isa : uint32_t { kBest, kPlain, kAmx };

// Null if this machine or this build lacks it; the best one is never the reference.
inline MultiplyBf16 find_bf16_kernel(Bf16Isa isa) {
  return isa == Bf16Isa::kPlain ? plain_bf16_kernel() : amx_bf16_kernel();
}

BLINK_CLONES inline void round_row(const float* x, uint32_t count, uint16_t* out) {
  typedef uint32_t Words __attribute__((vector_size(64)));
  typedef uint16_t Halves __attribute__((vector_size(32), aligned(2)));
  for (uint32_t i = 0; i < count; i += 16) {
    Words bits;
    std::memcpy(&bits, x + i, sizeof bits);
    *reinterpret_cast<Halves*>(out + i) = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, Halves);
  }
}

// As multiply() of product.h does, with x and the weight rounded to bfloat16.
inline void multiply_bf16(MultiplyBf16 kernel, const GgufWeight& weight, const float* x, uint32_t x_rows, float* out,
                          ThreadPool& pool) {
  const uint32_t columns = uint32_t(weight.columns);
  std::vector<uint16_t> rounded(uint64_t(x_rows + kBf16Rows - 1) / kBf16Rows * kBf16Rows * columns);
  pool.share(x_rows, [&](uint64_t row) { round_row(x + row * columns, columns, rounded.data() + row * columns); });
  const uint64_t rows = count_rows(weight);
  share_rows(weight, pool, kBf16Rows, [&](const GgufRows& part, uint64_t first) {
    kernel({part, columns, x_rows, rounded.data(), out + first, rows});
  });
}

}  // namespace blink
