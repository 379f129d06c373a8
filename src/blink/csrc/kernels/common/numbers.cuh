// SPDX-License-Identifier: Apache-2.0
// Numbers of fewer bits: what they become, and how matrices that a warp's registers hold are multiplied. As in ptx.cuh,
// what came with newer architectures is nothing on older ones.
#pragma once

namespace blink {

struct Bf16 {
  unsigned short bits;
};

struct Vec16 {  // 16 bytes: eight bf16
  unsigned x, y, z, w;
};

__device__ inline void to_words(Vec16 v, unsigned* words) {
  words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
}

__device__ inline float low_float(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_float(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ inline float to_float(Bf16 value) { return __uint_as_float(unsigned(value.bits) << 16); }

__device__ inline unsigned to_bf16_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ inline Bf16 to_bf16(float value) { return {static_cast<unsigned short>(to_bf16_pair(value, 0.0f))}; }

// The larger one, or NaN if one is.
__device__ inline float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// A power of two to about 22 bits; 0 in place of the smallest.
__device__ inline float exp2_fast(float exponent) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  return power;
}

__device__ inline float silu(float x) { return __fdividef(x, 1 + __expf(-x)); }

// Products of two pairs of bf16 and what is added to them, rounded once.
__device__ inline unsigned fma_pairs(unsigned a, unsigned b, unsigned c) {
  unsigned sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

__device__ inline unsigned multiply_pairs(unsigned a, unsigned b) { return fma_pairs(a, b, 0x80008000u); }

__device__ inline Vec16 multiply(Vec16 a, Vec16 b) {
  return {multiply_pairs(a.x, b.x), multiply_pairs(a.y, b.y), multiply_pairs(a.z, b.z), multiply_pairs(a.w, b.w)};
}

// Pairs of activations times a norm's weights, which are bf16 or floats; rounded once.
__device__ inline unsigned normalize(unsigned pair, const Bf16* weights) {
  return multiply_pairs(pair, *reinterpret_cast<const unsigned*>(weights));
}

__device__ inline unsigned normalize(unsigned pair, const float* weights) {
  const float2 both = *reinterpret_cast<const float2*>(weights);
  return to_bf16_pair(low_float(pair) * both.x, high_float(pair) * both.y);
}

__device__ inline Vec16 normalize(Vec16 v, const Bf16* weights) {
  const uint4 all = *reinterpret_cast<const uint4*>(weights);  // one load: a Vec16 is aligned as its words are
  return multiply(v, {all.x, all.y, all.z, all.w});
}

__device__ inline Vec16 normalize(Vec16 v, const float* weights) {
  return {normalize(v.x, weights), normalize(v.y, weights + 2), normalize(v.z, weights + 4),
          normalize(v.w, weights + 6)};
}

__device__ inline float square_sum(unsigned pair) {
  return low_float(pair) * low_float(pair) + high_float(pair) * high_float(pair);
}

__device__ inline float square_sum(Vec16 v) {
  return square_sum(v.x) + square_sum(v.y) + square_sum(v.z) + square_sum(v.w);
}

// Sums of products over 16 k of 16 rows (a) and 8 columns (b). Which k a lane's registers hold is free, as long as a
// and b agree: each lane takes 8 consecutive k, 16 bytes, for two of these. Lane l has a's rows l / 4 (a0, a2) and 8 +
// l / 4 (a1, a3), b's column l / 4, and of the sums row l / 4 (0, 1) and 8 + l / 4 (2, 3), columns l % 4 * 2 and the
// next.
__device__ inline void multiply_add(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                    unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The first of two f16.
__device__ inline float low_half(unsigned pair) {
  float value;
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(value) : "r"(pair));
  return value;
}

__device__ inline unsigned fma_halves(unsigned a, unsigned b, unsigned c) {
  unsigned sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

__device__ inline unsigned to_half_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// As multiply_add(), with f16.
__device__ inline void multiply_add_halves(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                           unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same over 32 k, with bytes: of a with signs, of b without. A lane's registers hold four k each.
__device__ inline void multiply_add_bytes(int (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four e4m3 as f16.
__device__ inline void to_half_pairs(unsigned word, unsigned& low, unsigned& high) {
#if __CUDA_ARCH__ >= 890
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
      : "=r"(low), "=r"(high)
      : "r"(word));
#endif
}

__device__ inline unsigned short to_e4m3_pair(float low, float high) {
  unsigned short pair = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}

__device__ inline unsigned short to_e5m2_pair(float low, float high) {
  unsigned short pair = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}

// An e5m2 is the first byte of an f16.
__device__ inline float from_e5m2(unsigned byte) { return low_half(byte << 8); }

}  // namespace blink
