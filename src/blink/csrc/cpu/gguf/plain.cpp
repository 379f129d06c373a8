// SPDX-License-Identifier: Apache-2.0
// The block kernels for processors of which nothing is known: vectors of four, as every compiler makes them.
#include "cpu/gguf/tiles.h"

namespace blink {
namespace {

struct Plain {
  static constexpr uint32_t kLanes = 4, kSums = 8;
  typedef float Float __attribute__((vector_size(16)));
  typedef int32_t Int __attribute__((vector_size(16)));

  struct Nibbles {
    float scale, offset;
    BLINK_INLINE Nibbles(float scale, float offset) : scale(scale), offset(offset) {}
    BLINK_INLINE Float low(Int bytes) const { return to_float(bytes & 15) * scale + offset; }
    BLINK_INLINE Float high(Int bytes) const { return low(bytes >> 4); }
  };

  // A half's exponent is 112 too small in a float's place; its largest means infinity, or no number.
  static BLINK_INLINE float widen_half(uint16_t half) {
    const uint32_t magnitude = uint32_t(half & 0x7fff) << 13, sign = uint32_t(half & 0x8000) << 16;
    const bool finite = (half & 0x7c00) != 0x7c00;
    const uint32_t bits = (finite ? magnitude : magnitude | 0x7f800000) | sign;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return finite ? value * 0x1p112f : value;
  }
  static BLINK_INLINE Int widen(const uint8_t* bytes) { return Int{bytes[0], bytes[1], bytes[2], bytes[3]}; }
  static BLINK_INLINE Int widen_signed(const uint8_t* bytes) {
    return Int{int8_t(bytes[0]), int8_t(bytes[1]), int8_t(bytes[2]), int8_t(bytes[3])};
  }
  static BLINK_INLINE Float to_float(Int values) { return __builtin_convertvector(values, Float); }
  static BLINK_INLINE Float load(const float* values) {
    Float found;
    std::memcpy(&found, values, sizeof found);
    return found;
  }
  static BLINK_INLINE float sum(Float values) { return (values[0] + values[2]) + (values[1] + values[3]); }
};

}  // namespace

const GgufKernels* plain_gguf_kernels() { return &kGgufKernels<Plain>; }

}  // namespace blink
