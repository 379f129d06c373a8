// SPDX-License-Identifier: Apache-2.0
// GEMMs in integers on AVX-512 VNNI; compiled for it, so nothing here may be called before the processor was
// asked. A dot product adds four columns of a row of the weight up with the same four of x: see columns.h.
#include "cpu/gguf/kernels.h"

#if defined(__AVX512VNNI__)
#include "cpu/gguf/columns.h"
#include "cpu/gguf/int16.h"

namespace blink {
namespace {

BLINK_INLINE Words spread_word(const int8_t* bytes) {
  int32_t word;
  std::memcpy(&word, bytes, sizeof word);
  return _mm512_set1_epi32(word);
}

// Integer products of a group's halves with 32 columns of kCount rows of x, whose upper halves count 256 times. Their
// sums grow side by side, as an addition takes longer than what it adds.
template <uint32_t kCount>
struct Dots {
  Words upper[kCount][2], lower[kCount][2];
  BLINK_INLINE Dots(const Group& group, const int8_t* x) {
    const auto for_sums = [&](const auto& work) __attribute__((always_inline)) {
      unroll<2>([&](auto half) __attribute__((always_inline)) {
        unroll<kCount>([&](auto row) __attribute__((always_inline)) { work(row, half); });
      });
    };
    for_sums([&](auto row, auto half)
                 __attribute__((always_inline)) { upper[row][half] = lower[row][half] = _mm512_setzero_si512(); });
    unroll<4>([&](auto i) __attribute__((always_inline)) {
      for_sums([&](auto row, auto half) __attribute__((always_inline)) {
        const int8_t* own = x + row * 2 * kGroup + 16 * half + 4 * i;
        const Words quants = group.quants[4 * half + i];
        upper[row][half] = _mm512_dpbusd_epi32(upper[row][half], quants, spread_word(own));
        lower[row][half] = _mm512_dpbusd_epi32(lower[row][half], quants, spread_word(own + kGroup));
      });
    });
  }
  BLINK_INLINE static __m512 join(Words upper, Words lower) {
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower));
  }
  BLINK_INLINE __m512 half(uint32_t row, uint32_t i) const { return join(upper[row][i], lower[row][i]); }
  BLINK_INLINE __m512 both(uint32_t row) const {
    return join(_mm512_add_epi32(upper[row][0], upper[row][1]), _mm512_add_epi32(lower[row][0], lower[row][1]));
  }
};

// Add the products of a group with 32 columns of a row of x.
template <bool kHalves, uint32_t kCount>
BLINK_INLINE __m512 add_group(__m512 total, const Group& group, const Dots<kCount>& dots, uint32_t row, float x_scale,
                              const float* x_sums) {
  const __m512 scale = _mm512_set1_ps(x_scale);
  if constexpr (kHalves) {
    total = _mm512_fmadd_ps(dots.half(row, 0), group.scales[0] * scale, total);
    total = _mm512_fmadd_ps(dots.half(row, 1), group.scales[1] * scale, total);
  } else {
    total = _mm512_fmadd_ps(dots.both(row), group.scales[0] * scale, total);
  }
  total = _mm512_fmadd_ps(group.offsets[0], _mm512_set1_ps(x_sums[0]), total);
  return _mm512_fmadd_ps(group.offsets[1], _mm512_set1_ps(x_sums[1]), total);
}

// kRows rows of x from `row` on, which lie together, and their sums with 16 rows of the weight.
template <uint32_t kRows>
struct Sums {
  const Int16Matmul& p;
  uint32_t row;
  const int8_t* x;
  const float *scales, *sums;
  __m512 totals[kRows] = {};

  BLINK_INLINE Sums(const Int16Matmul& p, uint32_t row) : p(p), row(row) {
    const uint64_t first = p.x.place(row, 0, p.columns / kGroup);
    x = p.x.quants + 2 * first * kGroup;
    scales = p.x.scales + first;
    sums = p.x.sums + 2 * first;
  }
  template <bool kHalves>
  BLINK_INLINE void add(uint32_t at, const Group& group) {
    const int8_t* own = x + uint64_t(at) * kRows * 2 * kGroup;
    const float *own_scales = scales + at * kRows, *own_sums = sums + at * kRows * 2;
    constexpr uint32_t kCount = kRows < 2 ? 1 : 2;
    unroll<kRows / kCount>([&](auto pair) __attribute__((always_inline)) {
      const Dots<kCount> dots(group, own + pair * kCount * 2 * kGroup);
      unroll<kCount>([&](auto i) __attribute__((always_inline)) {
        constexpr uint32_t kRow = pair * kCount + i;
        totals[kRow] = add_group<kHalves>(totals[kRow], group, dots, i, own_scales[kRow], own_sums + 2 * kRow);
      });
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
    for (uint32_t row = 0; row < p.x_rows; row += kMostTogether) {
      Sums<kMostTogether> sums(p, row);
      for (uint32_t at = 0; at < groups.size(); ++at) sums.template add<Block<Format>::kHalves>(at, groups[at]);
      sums.write(out, count);
    }
  });
}

void multiply_vnni(const Int16Matmul& p) {
  with_format(p.weight.format, [&]<class Format>(Format) {
    if (p.x_rows > kMostTogether) return multiply_many<Format>(p);
    multiply_tiles<Format, kMostTogether>(p, [&]<uint32_t kRows>(Rows rows, uint32_t row, float* out, uint32_t count) {
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
