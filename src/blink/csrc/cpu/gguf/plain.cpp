// SPDX-License-Identifier: Apache-2.0
// The block kernels for processors of which nothing is known: vectors of four, as every compiler makes them.
#include <vector>

#include "cpu/gguf/bf16.h"
#include "cpu/gguf/int16.h"
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

// Rows of the weight one by one; widen_weight: what is made of one of its numbers, widen_x: of x, by row and column.
template <class Matmul, class WidenWeight, class WidenX>
void multiply_plainly(const Matmul& p, const WidenWeight& widen_weight, const WidenX& widen_x) {
  const uint64_t row_bytes = p.columns / block_size(p.weight.format).values * block_size(p.weight.format).bytes;
  std::vector<float> weight(p.columns);
  for (uint64_t row = 0; row < p.weight.rows; ++row) {
    dequantize_gguf<Plain>({p.weight.blocks + row * row_bytes, p.weight.format, 1}, p.columns, weight.data());
    for (uint64_t i = 0; i < p.x_rows; ++i) {
      double sum = 0;
      for (uint64_t column = 0; column < p.columns; ++column)
        sum += double(widen_weight(weight[column])) * widen_x(i * p.columns + column);
      p.out[i * p.out_stride + row] = float(sum);
    }
  }
}

void multiply_bf16(const Bf16Matmul& p) {
  const auto round = [](float value) { return widen_bf16(round_bf16(value)); };
  multiply_plainly(p, round, [&](uint64_t at) { return widen_bf16(p.x[at]); });
}

void multiply_int16(const Int16Matmul& p) {
  const auto widen = [&](uint64_t at) {
    const uint64_t column = at % p.columns;
    const uint64_t place = p.x.place(at / p.columns, column / kInt16Group, p.columns / kInt16Group);
    const int8_t* halves = p.x.quants + 2 * place * kInt16Group + column % kInt16Group;
    return p.x.scales[place] * float(halves[0] * 256 + halves[kInt16Group]);
  };
  multiply_plainly(p, [](float value) { return value; }, widen);
}

}  // namespace

MultiplyBf16 plain_bf16_kernel() { return multiply_bf16; }
MultiplyInt16 plain_int16_kernel() { return multiply_int16; }

const GgufKernels* plain_gguf_kernels() { return &kGgufKernels<Plain>; }

}  // namespace blink
