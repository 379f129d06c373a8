// SPDX-License-Identifier: Apache-2.0
// 16 rows of a weight at a time, for files that are compiled for AVX-512 alone.
//
// A lane of a vector belongs to one of the rows, and has four of its columns, a byte each. So no sum goes across lanes,
// and scales of 16 rows are widened together.
#pragma once

#include <vector>

#include "cpu/gguf/avx512.h"
#include "cpu/gguf/kernels.h"
#include "cpu/gguf/tiles.h"

namespace blink {
namespace {

constexpr uint32_t kTileRows = 16;
using Words = __m512i;

// 16 rows of a weight: where the first one is, from one of whose blocks on something is read, and how far they lie
// apart.
struct Rows {
  const uint8_t* first;
  uint64_t stride;
  BLINK_INLINE Rows at(uint64_t bytes) const { return {first + bytes, stride}; }
};

BLINK_INLINE __m128i load_quarter(const uint8_t* bytes) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}

// 16 bytes of every fourth row.
BLINK_INLINE Words load_rows(const uint8_t* first, uint64_t stride) {
  Words rows = _mm512_castsi128_si512(load_quarter(first));
  rows = _mm512_inserti32x4(rows, load_quarter(first + 4 * stride), 1);
  rows = _mm512_inserti32x4(rows, load_quarter(first + 8 * stride), 2);
  return _mm512_inserti32x4(rows, load_quarter(first + 12 * stride), 3);
}

// 16 bytes of each row, as four vectors of four bytes of each.
BLINK_INLINE void load_columns(Rows rows, Words* columns) {
  Words own[4];
  unroll<4>([&](auto i)
                __attribute__((always_inline)) { own[i] = load_rows(rows.first + i * rows.stride, rows.stride); });
  const Words even_low = _mm512_unpacklo_epi32(own[0], own[1]), odd_low = _mm512_unpacklo_epi32(own[2], own[3]);
  const Words even_high = _mm512_unpackhi_epi32(own[0], own[1]), odd_high = _mm512_unpackhi_epi32(own[2], own[3]);
  columns[0] = _mm512_unpacklo_epi64(even_low, odd_low);
  columns[1] = _mm512_unpackhi_epi64(even_low, odd_low);
  columns[2] = _mm512_unpacklo_epi64(even_high, odd_high);
  columns[3] = _mm512_unpackhi_epi64(even_high, odd_high);
}

// Four bytes of each row.
BLINK_INLINE Words gather_words(Rows rows) {
  const Words lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_i32gather_epi32(_mm512_mullo_epi32(lanes, _mm512_set1_epi32(int32_t(rows.stride))), rows.first, 1);
}

BLINK_INLINE Words with_mask(Words words, uint32_t mask) {
  return _mm512_and_si512(words, _mm512_set1_epi32(int32_t(mask)));
}
BLINK_INLINE Words low_nibbles(Words words) { return with_mask(words, 0x0f0f0f0f); }
BLINK_INLINE Words high_nibbles(Words words) { return low_nibbles(_mm512_srli_epi32(words, 4)); }
BLINK_INLINE __m512 low_halves(Words words) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)); }
BLINK_INLINE __m512 high_halves(Words words) { return low_halves(_mm512_srli_epi32(words, 16)); }
BLINK_INLINE __m512 widen_bits(Words words, uint32_t mask) { return _mm512_cvtepi32_ps(with_mask(words, mask)); }

// 32 columns of 16 rows: unsigned quants, of which each half stands for scale * quant + offset.
struct Group {
  Words quants[8];
  __m512 scales[2], offsets[2];
  BLINK_INLINE void set(__m512 scale, __m512 offset) {
    scales[0] = scales[1] = scale;
    offsets[0] = offsets[1] = offset;
  }
};

BLINK_INLINE void load_nibbles(Rows rows, Group& group) {
  Words words[4];
  load_columns(rows, words);
  unroll<4>([&](auto i) __attribute__((always_inline)) {
    group.quants[i] = low_nibbles(words[i]);
    group.quants[4 + i] = high_nibbles(words[i]);
  });
}

// What a block of a format has for all of its groups, and its groups one by one. kShared groups have their columns in
// the same bytes: load() takes the bytes of those from group `first` on, and read<I>() makes group first + I of them.
template <class Format>
struct Block;

template <>
struct Block<Q4_0> {
  static constexpr bool kHalves = false;
  static constexpr uint32_t kShared = 1;
  __m512 scale;
  BLINK_INLINE explicit Block(Rows rows) : scale(low_halves(gather_words(rows))) {}
  BLINK_INLINE void load(Rows, uint32_t) {}
  template <uint32_t>
  BLINK_INLINE void read(Rows rows, uint32_t, Group& group) const {
    load_nibbles(rows.at(2), group);
    group.set(scale, scale * -8.f);
  }
};

template <>
struct Block<Q4_1> {
  static constexpr bool kHalves = false;
  static constexpr uint32_t kShared = 1;
  Words header;
  BLINK_INLINE explicit Block(Rows rows) : header(gather_words(rows)) {}
  BLINK_INLINE void load(Rows, uint32_t) {}
  template <uint32_t>
  BLINK_INLINE void read(Rows rows, uint32_t, Group& group) const {
    load_nibbles(rows.at(4), group);
    group.set(low_halves(header), high_halves(header));
  }
};

template <>
struct Block<Q8_0> {
  static constexpr bool kHalves = false;
  static constexpr uint32_t kShared = 1;
  __m512 scale;
  BLINK_INLINE explicit Block(Rows rows) : scale(low_halves(gather_words(rows))) {}
  BLINK_INLINE void load(Rows, uint32_t) {}
  template <uint32_t>
  BLINK_INLINE void read(Rows rows, uint32_t, Group& group) const {
    load_columns(rows.at(2), group.quants);
    load_columns(rows.at(18), group.quants + 4);
    unroll<8>([&](auto i) __attribute__((always_inline)) {
      group.quants[i] = _mm512_xor_si512(group.quants[i], _mm512_set1_epi8(-128));  // 128 more, without a sign
    });
    group.set(scale, scale * -128.f);
  }
};

template <>
struct Block<Q4_K> {
  static constexpr bool kHalves = false;
  static constexpr uint32_t kShared = 2;
  Words words[4];  // scales and offsets of all groups: see Q4_K of formats.h
  __m512 scale, offset;
  Words held[8];  // two groups: low and high nibbles
  BLINK_INLINE explicit Block(Rows rows) {
    load_columns(rows, words);
    scale = low_halves(words[0]);
    offset = high_halves(words[0]);
  }
  BLINK_INLINE void load(Rows rows, uint32_t first) {
    load_columns(rows.at(16 + first / 2 * 32), held);
    load_columns(rows.at(32 + first / 2 * 32), held + 4);
  }
  template <uint32_t I>
  BLINK_INLINE void read(Rows, uint32_t first, Group& group) const {
    const uint32_t index = first + I;
    unroll<8>([&](auto i) __attribute__((always_inline)) {
      group.quants[i] = I == 0 ? low_nibbles(held[i]) : high_nibbles(held[i]);
    });
    const __m128i shift = _mm_cvtsi32_si128(int32_t(index % 4 * 8));
    const Words low = _mm512_srl_epi32(words[1], shift), middle = _mm512_srl_epi32(words[2], shift),
                high = _mm512_srl_epi32(words[3], shift);
    if (index < 4) {
      group.set(scale * widen_bits(low, 63), -(offset * widen_bits(middle, 63)));
    } else {
      const Words scales = _mm512_or_si512(with_mask(high, 15), with_mask(_mm512_srli_epi32(low, 2), 48));
      const Words offsets =
          _mm512_or_si512(with_mask(_mm512_srli_epi32(high, 4), 15), with_mask(_mm512_srli_epi32(middle, 2), 48));
      group.set(scale * _mm512_cvtepi32_ps(scales), -(offset * _mm512_cvtepi32_ps(offsets)));
    }
  }
};

template <>
struct Block<Q6_K> {
  static constexpr bool kHalves = true;
  static constexpr uint32_t kShared = 4;
  Words scales[4];  // of 16 columns each, a byte
  __m512 scale;
  Words low[16], high[8];  // four groups: nibbles of two, two times; two bits of all
  BLINK_INLINE explicit Block(Rows rows) : scale(high_halves(gather_words(rows.at(206)))) {
    load_columns(rows.at(192), scales);
  }
  BLINK_INLINE void load(Rows rows, uint32_t first) {
    unroll<4>([&](auto i) __attribute__((always_inline)) { load_columns(rows.at(first * 16 + i * 16), low + 4 * i); });
    load_columns(rows.at(128 + first * 8), high);
    load_columns(rows.at(144 + first * 8), high + 4);
  }
  template <uint32_t I>
  BLINK_INLINE void read(Rows, uint32_t first, Group& group) const {
    unroll<8>([&](auto i) __attribute__((always_inline)) {
      const Words own = low[I % 2 * 8 + i], more = _mm512_srli_epi32(high[i], 2 * I);
      group.quants[i] = _mm512_or_si512(I < 2 ? low_nibbles(own) : high_nibbles(own),
                                        _mm512_slli_epi32(with_mask(more, 0x03030303), 4));
    });
    unroll<2>([&](auto i) __attribute__((always_inline)) {
      const Words bytes = _mm512_slli_epi32(scales[first / 2 + I / 2], 24 - (I % 2 * 2 + i) * 8);
      group.scales[i] = scale * _mm512_cvtepi32_ps(_mm512_srai_epi32(bytes, 24));
      group.offsets[i] = group.scales[i] * -32.f;
    });
  }
};

// Call for some of the next tile's bytes.
BLINK_INLINE void prefetch(const uint8_t* next, uint32_t bytes) {
  for (uint32_t line = 0; line < bytes; line += 64) __builtin_prefetch(next + line);
}

// Call work(number, group) for the groups of one block after the other.
template <class Format, class Work>
BLINK_INLINE void for_groups(Rows rows, uint32_t columns, const Work& work) {
  const uint8_t* next = rows.first + kTileRows * rows.stride;
  for (uint32_t at = 0; at < columns / kGroup; rows = rows.at(Format::kBytes)) {
    Block<Format> block(rows);
    for (uint32_t first = 0; first < Format::kValues / kGroup; first += Block<Format>::kShared) {
      constexpr uint32_t kShare = kTileRows * Format::kBytes / (Format::kValues / kGroup / Block<Format>::kShared);
      prefetch(next, kShare);
      next += kShare;
      block.load(rows, first);
      unroll<Block<Format>::kShared>([&](auto i) __attribute__((always_inline)) {
        Group group;
        block.template read<i>(rows, first, group);
        work(at++, group);
      });
    }
  }
}

// Call work(16 rows, where their products go, how many of them are wanted) for all rows of a weight.
template <class Format, class Work>
void for_tiles(const GgufRows& weight, uint32_t columns, float* out, const Work& work) {
  const uint64_t row_bytes = uint64_t(columns / Format::kValues) * Format::kBytes, count = weight.rows % kTileRows;
  const uint8_t* blocks = weight.blocks;
  for (uint64_t left = weight.rows / kTileRows; left > 0; --left, blocks += kTileRows * row_bytes, out += kTileRows)
    work(Rows{blocks, row_bytes}, out, kTileRows);
  if (count == 0) return;
  // Fewer rows are copied: beyond them nothing may be read.
  thread_local std::vector<uint8_t> copy;
  copy.assign(kTileRows * row_bytes, 0);
  std::memcpy(copy.data(), blocks, count * row_bytes);
  work(Rows{copy.data(), row_bytes}, out, uint32_t(count));
}

// Compute all products of a weight with rows of x: multiply<kRows>(16 rows of the weight, first of so many rows of x,
// where their products go, how many of them are wanted). kRows is rows_together(): their sums stay in registers.
template <class Format, uint32_t kMost, uint32_t kRows = 1, class Matmul, class Multiply>
void multiply_tiles(const Matmul& p, const Multiply& multiply) {
  if constexpr (kRows < kMost) {
    if (rows_together(p.x_rows, kMost) > kRows) return multiply_tiles<Format, kMost, 2 * kRows>(p, multiply);
  }
  for_tiles<Format>(p.weight, p.columns, p.out, [&](Rows rows, float* out, uint32_t count) {
    for (uint32_t row = 0; row < p.x_rows; row += kRows) multiply.template operator()<kRows>(rows, row, out, count);
  });
}

// Write the sums of those rows of the weight that are wanted.
BLINK_INLINE void write_sums(float* out, uint32_t count, __m512 sums) {
  _mm512_mask_storeu_ps(out, __mmask16((1u << count) - 1), sums);
}

}  // namespace
}  // namespace blink
