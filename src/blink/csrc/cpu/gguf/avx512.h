// SPDX-License-Identifier: Apache-2.0
// Vectors of AVX-512 for the block kernels; for files that are compiled for it alone.
#pragma once

#include <immintrin.h>

// GCC 12 takes the undefined inputs of its own intrinsics for a mistake of ours.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include "cpu/gguf/formats.h"

namespace blink {
namespace {

struct Avx512 {
  static constexpr uint32_t kLanes = 16;
  using Float = __m512;
  typedef int32_t Int __attribute__((vector_size(64)));

  // All 16 values that a quant of 4 bits stands for: a permutation then looks them up, by the low 4 bits of its index.
  struct Nibbles {
    Float values;
    BLINK_INLINE Nibbles(float scale, float offset)
        : values(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) * scale + offset) {}
    BLINK_INLINE Float low(Int bytes) const { return _mm512_permutexvar_ps(__m512i(bytes), values); }
    BLINK_INLINE Float high(Int bytes) const { return low(bytes >> 4); }
  };

  static BLINK_INLINE float widen_half(uint16_t half) { return _cvtsh_ss(half); }
  static BLINK_INLINE Int widen(const uint8_t* bytes) {
    return Int(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
  }
  static BLINK_INLINE Int widen_signed(const uint8_t* bytes) {
    return Int(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
  }
  static BLINK_INLINE Float to_float(Int values) { return _mm512_cvtepi32_ps(__m512i(values)); }
};

}  // namespace
}  // namespace blink
