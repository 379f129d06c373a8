// SPDX-License-Identifier: Apache-2.0
// Weights of 8 and 4 bits: how they lie in memory, and how registers of f16 are made of them.
#pragma once

#include "kernels/common/ptx.cuh"
#include "kernels/formats.h"

namespace blink {

// A row is cut into units of 128 bytes. Of each, lane q of the four that share a row in a matrix instruction has the 32
// bytes from q * 32 on: for each step s of the instruction, 16 k, those at 16 * s + 2 * q, the next, and 8 further.
template <FormatId kFormat>
constexpr int kUnit = kFormat == FormatId::kFp8 ? 128 : 256;  // k
constexpr int kUnitBytes = 128, kGroup = 128;                 // k that share a scale and a zero point

// Load what a lane of a wgmma has of a group of kInt4, half of a box of units: of two weight rows, as the
// sums of multiply_boxes() have them.
__device__ inline void load_half_units(const Bf16* box, int half, unsigned (&upper)[4], unsigned (&lower)[4]) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  const char* units = reinterpret_cast<const char*>(box) + row * kUnitBytes;
  const int place = ((lane % 4 * 2 + half) ^ lane / 4) * 16;  // swizzled: tensor_copy.cuh
  to_words(*reinterpret_cast<const Vec16*>(units + place), upper);
  to_words(*reinterpret_cast<const Vec16*>(units + place + 8 * kUnitBytes), lower);
}

// A group's word. kFp8: the scale, a float. kInt4: the scale as half, above it -(128 + zero point) as bf16.
template <FormatId kFormat>
__device__ inline float group_scale(unsigned word) {
  if constexpr (kFormat == FormatId::kFp8) return __uint_as_float(word);
  return low_half(word);
}

// Activations become f16, which must not overflow: those before a norm's rate may be large. Where their largest is not
// known, by this constant.
constexpr float kActivationDivisor = 64;

// Where it is, by the power of 2 that brings it to 2^14.
struct HalfScale {
  float factor, inverse;

  // Take the largest of the even and of the odd numbers, as bf16 without signs.
  __device__ explicit HalfScale(unsigned largest) {
    const unsigned exponent = max(max(largest >> 16, largest & 0xffff) >> 7, 15u);
    factor = __uint_as_float((268 - exponent) << 23);
    inverse = __uint_as_float((exponent - 14) << 23);
  }

  __device__ unsigned convert(unsigned pair) const {
    return to_half_pair(low_float(pair) * factor, high_float(pair) * factor);
  }
};

// The steps of which a word has weights: two registers for each, k 2 * q and the next, and these 8 further.
template <FormatId kFormat>
constexpr int kWordSteps = kFormat == FormatId::kFp8 ? 1 : 2;

// A word of a packed row as f16: neighbouring bytes are neighbouring k.
template <FormatId kFormat>
__device__ inline void dequantize_half(unsigned word, unsigned group, unsigned (&pairs)[kWordSteps<kFormat>][2]) {
  if constexpr (kFormat == FormatId::kFp8) {
    to_half_pairs(word, pairs[0][0], pairs[0][1]);
  } else {
    // As the mantissa of 1024: the number, or 16 times that. The word's bf16 has the zero point in its last bits.
    const unsigned zero = __byte_perm(group, 0, 0x3232) & 0x007f007fu;
    const unsigned once = zero | 0xe400e400u, sixteen = zero << 4 | 0xd400d400u;  // -(1024 + zero), -(64 + zero)
#pragma unroll
    for (int step = 0; step < 2; step++) {
      const unsigned codes = word >> 8 * step;
      pairs[step][0] = fma_halves((codes & 0x000f000fu) | 0x64006400u, 0x3c003c00u, once);
      pairs[step][1] = fma_halves((codes & 0x00f000f0u) | 0x64006400u, 0x2c002c00u, sixteen);
    }
  }
}

// What a lane's two weight rows have of a group of k, twice over. A scale of f16 is the sum of two bf16; what is
// multiplied with the second of them, three bits, is exact.
struct RowScales {
  unsigned zeros[2], firsts[2], seconds[2];  // -(128 + zero point); the scale's parts

  __device__ RowScales(unsigned upper, unsigned lower) {
    const unsigned words[2] = {upper, lower};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float scale = group_scale<FormatId::kInt4>(words[i]);
      zeros[i] = __byte_perm(words[i], 0, 0x3232);
      firsts[i] = to_bf16_pair(scale, scale);
      const float rest = scale - low_float(firsts[i]);
      seconds[i] = to_bf16_pair(rest, rest);
    }
  }

  // Take the numbers at a mask: in the last bits of 128 they lie where bf16 has its mantissa's end.
  __device__ unsigned convert(unsigned codes, unsigned mask, int row) const {
    const unsigned number = fma_pairs((codes & mask) | 0x43004300u, 0x3f803f80u, zeros[row]);
    return fma_pairs(number, firsts[row], multiply_pairs(number, seconds[row]));
  }
};

// The mask of the numbers, in a register: a constant would be loaded again for each word. No n is negative, which no
// compiler knows.
__device__ inline unsigned mask_of_codes(int n) { return 0x000f000fu + (unsigned(n) >> 31); }

// Make a row's registers of a word's two steps.
__device__ inline void dequantize_row(unsigned word, const RowScales& of, unsigned mask, int row, unsigned (&first)[4],
                                      unsigned (&second)[4]) {
  first[row] = of.convert(word, mask, row), first[row + 2] = of.convert(word >> 4, mask, row);
  second[row] = of.convert(word >> 8, mask, row), second[row + 2] = of.convert(word >> 12, mask, row);
}

// The same of both rows.
__device__ inline void dequantize_rows(unsigned upper, unsigned lower, const RowScales& of, unsigned mask,
                                       unsigned (&first)[4], unsigned (&second)[4]) {
  dequantize_row(upper, of, mask, 0, first, second);
  dequantize_row(lower, of, mask, 1, first, second);
}

}  // namespace blink
