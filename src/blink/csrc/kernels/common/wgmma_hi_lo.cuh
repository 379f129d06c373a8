// SPDX-License-Identifier: Apache-2.0
// Hopper's warpgroup MMAs (wgmma) of e4m3 weights, in shared memory or in registers, with hi/lo FP8 of e5m2 activations
// in shared memory.
#pragma once

#include "kernels/common/wgmma.cuh"

namespace blink {

// The instruction for so many columns; the operands behind the sums are named, those of a given.
#if __CUDA_ARCH_FEAT_SM90_ALL
#define BLINK_MULTIPLY_HI_LO(columns, sums, a_names, b_name, add_name, ...)                                 \
  asm volatile("{\n .reg .pred add;\n setp.ne.b32 add, %" #add_name                                         \
               ", 0;\n wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e5m2 {" BLINK_NAMES_##sums \
               "}, " a_names ", %" #b_name ", add, 1, 1;\n}"                                                \
               : BLINK_SUMS_##sums(0)                                                                       \
               : __VA_ARGS__, "l"(b), "n"(int(kAdd)))
#else
#define BLINK_MULTIPLY_HI_LO(columns, sums, a_names, b_name, add_name, ...)
#endif

// As multiply_boxes() over 32 k, of all hi/lo FP8 tokens; without kAdd the sums begin here.
template <bool kAdd>
__device__ inline void multiply_hi_lo(float (&d)[8], unsigned long long a, unsigned long long b) {
  BLINK_MULTIPLY_HI_LO(16, 8, "%8", 9, 10, "l"(a));
}

template <bool kAdd>
__device__ inline void multiply_hi_lo(float (&d)[16], unsigned long long a, unsigned long long b) {
  BLINK_MULTIPLY_HI_LO(32, 16, "%16", 17, 18, "l"(a));
}

template <bool kAdd>
__device__ inline void multiply_hi_lo(float (&d)[32], unsigned long long a, unsigned long long b) {
  BLINK_MULTIPLY_HI_LO(64, 32, "%32", 33, 34, "l"(a));
}

template <bool kAdd>
__device__ inline void multiply_hi_lo(float (&d)[64], unsigned long long a, unsigned long long b) {
  BLINK_MULTIPLY_HI_LO(128, 64, "%64", 65, 66, "l"(a));
}

// The same with a in registers. Of 32 k, warp w and lane l hold k l % 4 * 4 and the next three of rows 16 * w + l / 4
// (a[0]) and 8 more (a[1]), and of the same rows 16 k further (a[2], a[3]).
template <bool kAdd>
__device__ inline void multiply_hi_lo(float (&d)[8], const unsigned (&a)[4], unsigned long long b) {
  BLINK_MULTIPLY_HI_LO(16, 8, "{%8, %9, %10, %11}", 12, 13, BLINK_REGISTERS);
}

template <bool kAdd>
__device__ inline void multiply_hi_lo(float (&d)[16], const unsigned (&a)[4], unsigned long long b) {
  BLINK_MULTIPLY_HI_LO(32, 16, "{%16, %17, %18, %19}", 20, 21, BLINK_REGISTERS);
}

template <bool kAdd>
__device__ inline void multiply_hi_lo(float (&d)[32], const unsigned (&a)[4], unsigned long long b) {
  BLINK_MULTIPLY_HI_LO(64, 32, "{%32, %33, %34, %35}", 36, 37, BLINK_REGISTERS);
}

template <bool kAdd>
__device__ inline void multiply_hi_lo(float (&d)[64], const unsigned (&a)[4], unsigned long long b) {
  BLINK_MULTIPLY_HI_LO(128, 64, "{%64, %65, %66, %67}", 68, 69, BLINK_REGISTERS);
}

#undef BLINK_MULTIPLY_HI_LO

}  // namespace blink
