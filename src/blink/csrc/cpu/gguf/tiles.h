// SPDX-License-Identifier: Apache-2.0
// GEMMs of float32 rows with weights in GGUF's blocks. Weights become float32 in registers. So a GEMM differs from that
// with the dequantized weight by the order of its sum alone, whatever the number of rows.
#pragma once

#include "cpu/gguf/formats.h"

namespace blink {

// How far ahead weights are called: rows are short and several are read at once, of which the processor makes no
// stream by itself. Asking beyond the end does nothing.
constexpr uint64_t kPrefetchBytes = 8192;

// Products of kWeights rows of the weight, from `first` on, with kRows rows of x from `row` on; rows that x lacks are
// computed as its last one and dropped.
template <class Isa, class Format, uint32_t kWeights, uint32_t kRows>
BLINK_INLINE void multiply_tile(const GgufMatmul& p, uint64_t first, uint32_t row) {
  using Float = typename Isa::Float;
  const uint64_t row_bytes = uint64_t(p.columns / Format::kValues) * Format::kBytes;
  const uint8_t* block = p.weight.blocks + first * row_bytes;
  const float* x[kRows];
  unroll<kRows>([&](auto i) __attribute__((always_inline)) {
    x[i] = p.x + uint64_t(row + i < p.x_rows ? row + i : p.x_rows - 1) * p.columns;
  });
  Float sums[kWeights][kRows] = {};
  for (uint32_t column = 0; column < p.columns; column += Format::kValues, block += Format::kBytes) {
    unroll<kWeights>([&](auto w) __attribute__((always_inline)) {
      const uint8_t* own = block + w * row_bytes;
      __builtin_prefetch(own + kPrefetchBytes);
      const auto scales = Format::template read_scales<Isa>(own);
      for (uint32_t group = 0; group < Format::kValues / kGroup; ++group) {
        Float values[kVectors<Isa>];
        Format::template decode<Isa>(own, scales, group, values);
        unroll<kRows>([&](auto i) __attribute__((always_inline)) {
          unroll<kVectors<Isa>>([&](auto v) __attribute__((always_inline)) {
            sums[w][i] += values[v] * Isa::load(x[i] + column + group * kGroup + v * Isa::kLanes);
          });
        });
      }
    });
  }
  unroll<kRows>([&](auto i) __attribute__((always_inline)) {
    unroll<kWeights>([&](auto w) __attribute__((always_inline)) {
      if (row + i < p.x_rows) p.out[(row + i) * p.out_stride + first + w] = Isa::sum(sums[w][i]);
    });
  });
}

// All products; few rows of x at a time, which stay in the nearest cache as the weights do.
template <class Isa, class Format, uint32_t kRows>
void multiply_rows(const GgufMatmul& p) {
  constexpr uint32_t kWeights = kRows * 4 <= Isa::kSums ? 4 : Isa::kSums / kRows;
  for (uint32_t row = 0; row < p.x_rows; row += kRows) {
    uint64_t first = 0;
    for (; first + kWeights <= p.weight.rows; first += kWeights)
      multiply_tile<Isa, Format, kWeights, kRows>(p, first, row);
    for (; first < p.weight.rows; ++first) multiply_tile<Isa, Format, 1, kRows>(p, first, row);
  }
}

template <class Isa, class Format>
void multiply_format(const GgufMatmul& p) {
  if (p.x_rows == 1)
    multiply_rows<Isa, Format, 1>(p);
  else if (p.x_rows == 2)
    multiply_rows<Isa, Format, 2>(p);
  else if (p.x_rows <= 4)
    multiply_rows<Isa, Format, 4>(p);
  else
    multiply_rows<Isa, Format, 8>(p);
}

template <class Isa, class Format>
void dequantize_format(const GgufRows& weight, uint32_t columns, float* out) {
  const uint64_t blocks = weight.rows * (columns / Format::kValues);
  const uint8_t* block = weight.blocks;
  for (uint64_t i = 0; i < blocks; ++i, block += Format::kBytes) {
    const auto scales = Format::template read_scales<Isa>(block);
    for (uint32_t group = 0; group < Format::kValues / kGroup; ++group, out += kGroup) {
      typename Isa::Float values[kVectors<Isa>];
      Format::template decode<Isa>(block, scales, group, values);
      std::memcpy(out, values, sizeof values);
    }
  }
}

// Call f with the format's type.
template <class F>
void with_format(GgufFormat format, F&& f) {
  switch (format) {
    case GgufFormat::kQ4_0:
      return f(Q4_0{});
    case GgufFormat::kQ4_1:
      return f(Q4_1{});
    case GgufFormat::kQ8_0:
      return f(Q8_0{});
    case GgufFormat::kQ4_K:
      return f(Q4_K{});
    case GgufFormat::kQ6_K:
      return f(Q6_K{});
  }
}

template <class Isa>
void multiply_gguf(const GgufMatmul& p) {
  with_format(p.weight.format, [&]<class Format>(Format) { multiply_format<Isa, Format>(p); });
}

template <class Isa>
void dequantize_gguf(const GgufRows& weight, uint32_t columns, float* out) {
  with_format(weight.format, [&]<class Format>(Format) { dequantize_format<Isa, Format>(weight, columns, out); });
}

template <class Isa>
constexpr GgufKernels kGgufKernels = {multiply_gguf<Isa>, dequantize_gguf<Isa>};

}  // namespace blink
