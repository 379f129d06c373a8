// SPDX-License-Identifier: Apache-2.0
// The block kernels for AVX-512; compiled for it, so nothing here may be called before the processor was asked.
//
// A GEMM's sums belong to 16 rows of the weight: see columns.h. A sum has one order, whatever the number of rows of x.
#include "cpu/gguf/kernels.h"

#if defined(__AVX512F__)
#include "cpu/gguf/columns.h"

namespace blink {
namespace {

// 16 weights in float32, of byte `index` of the words.
BLINK_INLINE __m512 widen_byte(Words words, uint32_t index, __m512 scale, __m512 offset) {
  const Words bytes = index == 0 ? words : _mm512_srli_epi32(words, index * 8);
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(index == 3 ? bytes : with_mask(bytes, 255)), scale, offset);
}

// Products of 16 rows of the weight, of which `count` are wanted, with kRows rows of x from `row` on; rows that x lacks
// are computed as its last one and dropped.
template <class Format, uint32_t kRows>
BLINK_INLINE void multiply_columns(const GgufMatmul& p, Rows rows, uint32_t row, float* out, uint32_t count) {
  const float* x[kRows];
  unroll<kRows>([&](auto i) __attribute__((always_inline)) {
    x[i] = p.x + uint64_t(row + i < p.x_rows ? row + i : p.x_rows - 1) * p.columns;
  });
  __m512 sums[kRows] = {};
  for_groups<Format>(rows, p.columns, [&](uint32_t at, const Group& group) __attribute__((always_inline)) {
    unroll<kGroup>([&](auto k) __attribute__((always_inline)) {
      const __m512 values = widen_byte(group.quants[k / 4], k % 4, group.scales[k / 16], group.offsets[k / 16]);
      unroll<kRows>([&](auto i) __attribute__((always_inline)) {
        sums[i] = _mm512_fmadd_ps(values, _mm512_set1_ps(x[i][at * kGroup + k]), sums[i]);
      });
    });
  });
  unroll<kRows>([&](auto i) __attribute__((always_inline)) {
    if (row + i < p.x_rows) write_sums(out + (row + i) * p.out_stride, count, sums[i]);
  });
}

void multiply_avx512(const GgufMatmul& p) {
  with_format(p.weight.format, [&]<class Format>(Format) {
    multiply_tiles<Format, 16>(p, [&]<uint32_t kRows>(Rows rows, uint32_t row, float* out, uint32_t count) {
      multiply_columns<Format, kRows>(p, rows, row, out, count);
    });
  });
}

constexpr GgufKernels kAvx512Kernels = {multiply_avx512, dequantize_gguf<Avx512>};

}  // namespace

const GgufKernels* avx512_gguf_kernels() { return &kAvx512Kernels; }

}  // namespace blink
#else
namespace blink {
const GgufKernels* avx512_gguf_kernels() { return nullptr; }
}  // namespace blink
#endif
