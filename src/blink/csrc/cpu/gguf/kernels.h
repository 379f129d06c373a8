// SPDX-License-Identifier: Apache-2.0
// What the code for each instruction set offers for weights in GGUF's blocks. `gguf/product.h` chooses among them.
#pragma once

#include <cstdint>

namespace blink {

// The formats that have kernels, by ggml's numbers of them.
enum class GgufFormat : uint64_t { kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 8, kQ4_K = 12, kQ6_K = 14 };

// Rows of a weight, one behind the other.
struct GgufRows {
  const uint8_t* blocks;
  GgufFormat format;
  uint64_t rows;
};

// out [x_rows, out_stride], of which the first columns are written, = x [x_rows, columns] times the weight's transpose.
struct GgufMatmul {
  GgufRows weight;
  uint32_t columns, x_rows;
  const float* x;
  float* out;
  uint64_t out_stride;
};

struct GgufKernels {
  void (*multiply)(const GgufMatmul&);
  void (*dequantize)(const GgufRows&, uint32_t columns, float* out);
};

// The same with x in bfloat16 and the weight rounded to it, and sums in float32. x has zeros behind its last row up to
// a multiple of 32 rows, and columns are a multiple of 32.
struct Bf16Matmul {
  GgufRows weight;
  uint32_t columns, x_rows;
  const uint16_t* x;
  float* out;
  uint64_t out_stride;
};
using MultiplyBf16 = void (*)(const Bf16Matmul&);

// Rows of x rounded to 16 bits: of each 32 columns, their upper halves and then their lower ones, and a scale; of each
// 16, the sum of what they stand for. `together` rows have what belongs to the same columns one behind the other:
// [x_rows / together, columns / 32, together] times [2, 32], 1 and 2. Rows that the last of these lack are 0.
struct Int16Rows {
  const int8_t* quants;
  const float* scales;
  const float* sums;
  uint32_t together;
  uint64_t place(uint64_t row, uint64_t group, uint64_t groups) const {
    return (row / together * groups + group) * together + row % together;
  }
};

// How many rows of x a kernel multiplies at a time: the least power of two that takes all of them, and at most `most`.
inline uint32_t rows_together(uint32_t x_rows, uint32_t most) {
  uint32_t together = 1;
  while (together < x_rows && together < most) together *= 2;
  return together;
}

// As GgufMatmul, with x in 16 bits; columns are a multiple of 32.
struct Int16Matmul {
  GgufRows weight;
  uint32_t columns, x_rows;
  Int16Rows x;
  float* out;
  uint64_t out_stride;
};
using MultiplyInt16 = void (*)(const Int16Matmul&);

// Null where the processor or the build lacks it.
MultiplyBf16 amx_bf16_kernel();
MultiplyInt16 vnni_int16_kernel();
// The references.
MultiplyBf16 plain_bf16_kernel();
MultiplyInt16 plain_int16_kernel();

// Null where the library was built for another processor.
const GgufKernels* avx512_gguf_kernels();
const GgufKernels* avx2_gguf_kernels();
const GgufKernels* plain_gguf_kernels();

struct BlockSize {
  uint32_t values, bytes;
};

// {0, 0} for a format that has no kernels.
constexpr BlockSize block_size(GgufFormat format) {
  switch (format) {
    case GgufFormat::kQ4_0:
      return {32, 18};
    case GgufFormat::kQ4_1:
      return {32, 20};
    case GgufFormat::kQ8_0:
      return {32, 34};
    case GgufFormat::kQ4_K:
      return {256, 144};
    case GgufFormat::kQ6_K:
      return {256, 210};
  }
  return {0, 0};
}

}  // namespace blink
