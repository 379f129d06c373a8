// SPDX-License-Identifier: Apache-2.0
// csrc/gpu/decode/numbers.cuh for emulated threads.
#pragma once

#include <cmath>

#include "fibers.h"

namespace blink {

struct Bf16 {
  unsigned short bits;
};

struct Vec16 {
  unsigned x, y, z, w;
};

inline float low_float(unsigned pair) { return __uint_as_float(pair << 16); }
inline float high_float(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }
inline float to_float(Bf16 value) { return __uint_as_float(unsigned(value.bits) << 16); }

inline Bf16 to_bf16(float value) {
  if (value != value) return {0x7fff};
  const unsigned bits = __float_as_uint(value);
  return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline unsigned to_bf16_pair(float low, float high) { return to_bf16(low).bits | unsigned(to_bf16(high).bits) << 16; }

inline unsigned multiply_pairs(unsigned a, unsigned b) {
  return to_bf16_pair(low_float(a) * low_float(b), high_float(a) * high_float(b));
}

inline Vec16 multiply(Vec16 a, Vec16 b) {
  return {multiply_pairs(a.x, b.x), multiply_pairs(a.y, b.y), multiply_pairs(a.z, b.z), multiply_pairs(a.w, b.w)};
}

inline float square_sum(unsigned pair) {
  return low_float(pair) * low_float(pair) + high_float(pair) * high_float(pair);
}

inline float square_sum(Vec16 v) { return square_sum(v.x) + square_sum(v.y) + square_sum(v.z) + square_sum(v.w); }

inline float low_half(unsigned pair) {
  const unsigned short bits = static_cast<unsigned short>(pair);
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return float(value);
}

inline float high_half(unsigned pair) { return low_half(pair >> 16); }

inline unsigned to_half_pair(float low, float high) {
  const _Float16 halves[2] = {_Float16(low), _Float16(high)};
  unsigned pair;
  std::memcpy(&pair, halves, 4);
  return pair;
}

inline unsigned fma_halves(unsigned a, unsigned b, unsigned c) {
  return to_half_pair(low_half(a) * low_half(b) + low_half(c), high_half(a) * high_half(b) + high_half(c));
}

inline float from_e4m3(unsigned byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const float value = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
  return byte & 128 ? -value : value;
}

inline void to_half_pairs(unsigned word, unsigned& low, unsigned& high) {
  low = to_half_pair(from_e4m3(word & 255), from_e4m3(word >> 8 & 255));
  high = to_half_pair(from_e4m3(word >> 16 & 255), from_e4m3(word >> 24));
}

inline float from_e5m2(unsigned byte) { return low_half(byte << 8); }

inline unsigned to_e5m2(float value) {
  if (value != value) return 0x7f;
  const float most = 57344, in_range = std::clamp(value, -most, most);
  const float step = std::ldexp(1.0f, std::max(std::ilogb(in_range), -14) - 2);
  return to_half_pair(in_range == 0 ? in_range : std::nearbyint(in_range / step) * step, 0) >> 8 & 255;
}

inline unsigned short to_e5m2_pair(float low, float high) {
  return static_cast<unsigned short>(to_e5m2(low) | to_e5m2(high) << 8);
}

// An mma.sync of 16 rows of a, 8 columns of b and so many k, of which a register has kEach. number(register, which):
// of a and of b.
template <int kEach, class Sum, class A, class B>
void multiply_fragments(Sum (&sums)[4], const std::array<uint64_t, 6>& registers, A of_a, B of_b) {
  const auto& shown = emulated::show(registers);
  constexpr int half = kEach * 4;  // k of a lane's first register and three neighbours'
  for (int i = 0; i < 4; i++) {
    const int row = emulated::lane() / 4 + i / 2 * 8, column = emulated::lane() % 4 * 2 + i % 2;
    for (int k = 0; k < 2 * half; k++) {
      const int in_row = k % half / kEach;
      sums[i] += of_a(unsigned(shown[row % 8 * 4 + in_row][row / 8 + k / half * 2]), k % kEach) *
                 of_b(unsigned(shown[column * 4 + in_row][4 + k / half]), k % kEach);
    }
  }
}

inline void multiply_add(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                         unsigned b1) {
  const auto number = [](unsigned pair, int i) { return i ? high_float(pair) : low_float(pair); };
  multiply_fragments<2>(sums, {a0, a1, a2, a3, b0, b1}, number, number);
}

inline void multiply_add_halves(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                unsigned b1) {
  const auto number = [](unsigned pair, int i) { return i ? high_half(pair) : low_half(pair); };
  multiply_fragments<2>(sums, {a0, a1, a2, a3, b0, b1}, number, number);
}

inline void multiply_add_bytes(int (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  multiply_fragments<4>(
      sums, {a[0], a[1], a[2], a[3], b0, b1}, [](unsigned word, int i) { return int8_t(word >> 8 * i); },
      [](unsigned word, int i) { return uint8_t(word >> 8 * i); });
}

}  // namespace blink
