// SPDX-License-Identifier: Apache-2.0
// Numbers of a KV cache on a CPU: float32, or float16 as its bits. Sixteen at a time become float32, exactly.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

// One source, compiled for several instruction sets, among which the loader chooses.
#if defined(__x86_64__) && __GNUC__ >= 12 && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define BLINK_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define BLINK_CLONES
#endif
#define BLINK_INLINE __attribute__((always_inline)) inline

namespace blink {

// Call f(0), f(1) and so on with constants.
template <uint32_t N, class F>
BLINK_INLINE void unroll(F&& f) {
  [&]<uint32_t... i>(std::integer_sequence<uint32_t, i...>) __attribute__((always_inline)) {
    (f(std::integral_constant<uint32_t, i>{}), ...);
  }(std::make_integer_sequence<uint32_t, N>{});
}

constexpr uint32_t kCellLanes = 16;
typedef float CellLanes __attribute__((vector_size(4 * kCellLanes), aligned(4)));
typedef int32_t CellInts __attribute__((vector_size(4 * kCellLanes)));
typedef int16_t CellHalves __attribute__((vector_size(2 * kCellLanes), aligned(2)));

BLINK_INLINE void load_cells(const float* cells, CellLanes& out) { out = *reinterpret_cast<const CellLanes*>(cells); }

// A half's exponent is 112 too small in a float's place. The cache has no infinity and no NaN: see narrow_cells().
BLINK_INLINE void load_cells(const uint16_t* cells, CellLanes& out) {
  const CellInts wide = __builtin_convertvector(*reinterpret_cast<const CellHalves*>(cells), CellInts);
  const CellInts bits = (wide << 13) & int32_t(0x8fffe000);
  out = CellLanes(bits) * 0x1p112f;
}

// Round sixteen floats to the nearest halves, the even ones of two; what is too large becomes the largest, 65504.
BLINK_INLINE void narrow_lanes(const float* values, uint16_t* out) {
  constexpr int32_t kMost = 0x477fe000, kLeastNormal = 0x38800000, kHalf = 0x3f000000;
  CellInts bits;
  std::memcpy(&bits, values, sizeof bits);
  CellInts magnitude = bits & 0x7fffffff;
  magnitude = magnitude > kMost ? CellInts{} + kMost : magnitude;
  const CellInts normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112 << 23)) >> 13;
  // An addition leaves of small numbers what a half has.
  const CellInts small = CellInts(CellLanes(magnitude) + 0.5f);
  const CellInts halves = (magnitude < kLeastNormal ? small - kHalf : normal) | ((bits >> 16) & 0x8000);
  *reinterpret_cast<CellHalves*>(out) = __builtin_convertvector(halves, CellHalves);
}

inline void narrow_cells(float* cells, const float* values, uint32_t count) {
  std::memcpy(cells, values, count * sizeof(float));
}

BLINK_CLONES inline void narrow_cells(uint16_t* cells, const float* values, uint32_t count) {
  uint32_t i = 0;
  for (; i + kCellLanes <= count; i += kCellLanes) narrow_lanes(values + i, cells + i);
  if (i == count) return;
  float rest[kCellLanes] = {};
  uint16_t narrow[kCellLanes];
  std::memcpy(rest, values + i, (count - i) * sizeof(float));
  narrow_lanes(rest, narrow);
  std::memcpy(cells + i, narrow, (count - i) * sizeof(uint16_t));
}

// Call f with a number of the type of a cache's cells.
template <class F>
void with_cells(uint32_t is_half, F&& f) {
  if (is_half != 0)
    f(uint16_t{});
  else
    f(float{});
}

}  // namespace blink
