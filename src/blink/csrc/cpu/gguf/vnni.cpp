// SPDX-License-Identifier: Apache-2.0
// GEMMs in integers on AVX-512 VNNI; compiled for it, so nothing here may be called before the processor was
// asked. A dot product adds four columns of a row of the weight up with the same four of x: see columns.h.
#include "cpu/gguf/kernels.h"

#if defined(__AVX512VNNI__)
#include "cpu/gguf/columns.h"

namespace blink {
namespace {

constexpr uint32_t kMostRows = 8;  // of x, whose sums stay in registers

BLINK_INLINE Words spread_word(const int8_t* bytes) {
  int32_t word;
  std::memcpy(&word, bytes, sizeof word);
  return _mm512_set1_epi32(word);
}

// The products of 16 columns: those of the upper halves of x count 256 times.
BLINK_INLINE Words dot_half(const Words* quants, const int8_t* x) {
  Words sums = _mm512_setzero_si512();
  unroll<4>([&](auto i) __attribute__((always_inline)) {
    sums = _mm512_dpbusd_epi32(sums, quants[i], spread_word(x + 4 * i));
  });
  sums = _mm512_slli_epi32(sums, 8);
  unroll<4>([&](auto i) __attribute__((always_inline)) {
    sums = _mm512_dpbusd_epi32(sums, quants[i], spread_word(x + kGroup + 4 * i));
  });
  return sums;
}

// Add the products of a group with 32 columns of a row of x.
template <bool kHalves>
BLINK_INLINE __m512 add_group(__m512 total, const Group& group, const int8_t* x, float x_scale, const float* x_sums) {
  const Words low = dot_half(group.quants, x), high = dot_half(group.quants + 4, x + 16);
  const __m512 scale = _mm512_set1_ps(x_scale);
  if constexpr (kHalves) {
    total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(low), group.scales[0] * scale, total);
    total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), group.scales[1] * scale, total);
  } else {
    total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(low, high)), group.scales[0] * scale, total);
  }
  total = _mm512_fmadd_ps(group.offsets[0], _mm512_set1_ps(x_sums[0]), total);
  return _mm512_fmadd_ps(group.offsets[1], _mm512_set1_ps(x_sums[1]), total);
}

// kRows rows of x from `row` on, and their sums with 16 rows of the weight; rows that x lacks are its last one,
// dropped.
template <uint32_t kRows>
struct Sums {
  const Int16Matmul& p;
  uint32_t row;
  const int8_t* x[kRows];
  const float *scales[kRows], *sums[kRows];
  __m512 totals[kRows] = {};

  BLINK_INLINE Sums(const Int16Matmul& p, uint32_t row) : p(p), row(row) {
    unroll<kRows>([&](auto i) __attribute__((always_inline)) {
      const uint64_t own = row + i < p.x_rows ? row + i : p.x_rows - 1;
      x[i] = p.x.quants + 2 * own * p.columns;
      scales[i] = p.x.scales + own * (p.columns / kGroup);
      sums[i] = p.x.sums + own * (p.columns / kGroup * 2);
    });
  }
  template <bool kHalves>
  BLINK_INLINE void add(uint32_t at, const Group& group) {
    unroll<kRows>([&](auto i) __attribute__((always_inline)) {
      totals[i] = add_group<kHalves>(totals[i], group, x[i] + 2 * at * kGroup, scales[i][at], sums[i] + 2 * at);
    });
  }
  // Write the products, of which `count` of each row are wanted.
  BLINK_INLINE void write(float* out, uint32_t count) const {
    unroll<kRows>([&](auto i) __attribute__((always_inline)) {
      if (row + i < p.x_rows) write_sums(out + (row + i) * p.out_stride, count, totals[i]);
    });
  }
};

// Products of 16 rows of the weight with few rows of x, whose sums stay in registers.
template <class Format, uint32_t kRows>
BLINK_INLINE void multiply_tile(const Int16Matmul& p, Rows rows, uint32_t row, float* out, uint32_t count) {
  Sums<kRows> sums(p, row);
  for_groups<Format>(rows, p.columns, [&](uint32_t at, const Group& group) __attribute__((always_inline)) {
    sums.template add<Block<Format>::kHalves>(at, group);
  });
  sums.write(out, count);
}

// The same with any number of rows: the groups are made once.
template <class Format>
void multiply_many(const Int16Matmul& p) {
  thread_local std::vector<Group> groups;
  groups.resize(p.columns / kGroup);
  for_tiles<Format>(p.weight, p.columns, p.out, [&](Rows rows, float* out, uint32_t count) {
    for_groups<Format>(rows, p.columns, [&](uint32_t at, const Group& group) { groups[at] = group; });
    for (uint32_t row = 0; row < p.x_rows; row += kMostRows) {
      Sums<kMostRows> sums(p, row);
      for (uint32_t at = 0; at < groups.size(); ++at) sums.template add<Block<Format>::kHalves>(at, groups[at]);
      sums.write(out, count);
    }
  });
}

void multiply_vnni(const Int16Matmul& p) {
  with_format(p.weight.format, [&]<class Format>(Format) {
    if (p.x_rows > kMostRows) return multiply_many<Format>(p);
    multiply_tiles<Format, kMostRows>(p, [&]<uint32_t kRows>(Rows rows, uint32_t row, float* out, uint32_t count) {
      multiply_tile<Format, kRows>(p, rows, row, out, count);
    });
  });
}

}  // namespace

MultiplyInt16 vnni_int16_kernel() { return __builtin_cpu_supports("avx512vnni") != 0 ? multiply_vnni : nullptr; }

}  // namespace blink
#else
namespace blink {
MultiplyInt16 vnni_int16_kernel() { return nullptr; }
}  // namespace blink
#endif
