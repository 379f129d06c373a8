// SPDX-License-Identifier: Apache-2.0
// The block kernels for AVX2 with FMA and F16C; compiled for these, so nothing here may be called before the processor
// was asked.
#include "cpu/gguf/kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#include "cpu/gguf/tiles.h"

namespace blink {
namespace {

struct Avx2 {
  static constexpr uint32_t kLanes = 8, kSums = 8;
  using Float = __m256;
  typedef int32_t Int __attribute__((vector_size(32)));

  struct Nibbles {
    float scale, offset;
    BLINK_INLINE Nibbles(float scale, float offset) : scale(scale), offset(offset) {}
    BLINK_INLINE Float low(Int bytes) const { return to_float(bytes & 15) * scale + offset; }
    BLINK_INLINE Float high(Int bytes) const { return low(bytes >> 4); }
  };

  static BLINK_INLINE float widen_half(uint16_t half) { return _cvtsh_ss(half); }
  static BLINK_INLINE Int widen(const uint8_t* bytes) {
    return Int(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))));
  }
  static BLINK_INLINE Int widen_signed(const uint8_t* bytes) {
    return Int(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))));
  }
  static BLINK_INLINE Float to_float(Int values) { return _mm256_cvtepi32_ps(__m256i(values)); }
  static BLINK_INLINE Float load(const float* values) { return _mm256_loadu_ps(values); }
  static BLINK_INLINE float sum(Float values) {
    const __m128 pairs = _mm256_castps256_ps128(values) + _mm256_extractf128_ps(values, 1);
    const __m128 two = pairs + _mm_movehl_ps(pairs, pairs);
    return two[0] + two[1];
  }
};

}  // namespace

const GgufKernels* avx2_gguf_kernels() { return &kGgufKernels<Avx2>; }

}  // namespace blink
#else
namespace blink {
const GgufKernels* avx2_gguf_kernels() { return nullptr; }
}  // namespace blink
#endif
