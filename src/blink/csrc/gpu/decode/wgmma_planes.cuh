// SPDX-License-Identifier: Apache-2.0
// Hopper's warpgroup products of e4m3 weights, in shared memory or in registers, with planes of e5m2 activations in
// shared memory.
#pragma once

#include "wgmma.cuh"

namespace blink {

// As multiply_boxes() over 32 k, of all planes' tokens; without kAdd the sums begin here.
template <bool kAdd>
__device__ inline void multiply_planes(float (&d)[8], unsigned long long a, unsigned long long b) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n .reg .pred add;\n setp.ne.b32 add, %10, 0;\n wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e5m2 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, add, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "l"(a), "l"(b), "n"(int(kAdd)));
#endif
}

template <bool kAdd>
__device__ inline void multiply_planes(float (&d)[16], unsigned long long a, unsigned long long b) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n .reg .pred add;\n setp.ne.b32 add, %18, 0;\n wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e5m2 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, add, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "n"(int(kAdd)));
#endif
}

template <bool kAdd>
__device__ inline void multiply_planes(float (&d)[32], unsigned long long a, unsigned long long b) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n .reg .pred add;\n setp.ne.b32 add, %34, 0;\n wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "n"(int(kAdd)));
#endif
}

template <bool kAdd>
__device__ inline void multiply_planes(float (&d)[64], unsigned long long a, unsigned long long b) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n .reg .pred add;\n setp.ne.b32 add, %66, 0;\n wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e5m2 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "
      "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, add, 1, "
      "1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "n"(int(kAdd)));
#endif
}

// The instruction for so many columns whose first operand lies in registers; the operands behind the sums are named.
#if __CUDA_ARCH_FEAT_SM90_ALL
#define BLINK_MULTIPLY_PLANES(columns, sums, a_names, b_name, add_name)                                     \
  asm volatile("{\n .reg .pred add;\n setp.ne.b32 add, %" #add_name                                         \
               ", 0;\n wgmma.mma_async.sync.aligned.m64n" #columns "k32.f32.e4m3.e5m2 {" BLINK_NAMES_##sums \
               "}, {" a_names "}, %" #b_name ", add, 1, 1;\n}"                                              \
               : BLINK_SUMS_##sums(0)                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(kAdd)))
#else
#define BLINK_MULTIPLY_PLANES(columns, sums, a_names, b_name, add_name)
#endif

// Have these registers written before what follows.
__device__ inline void keep(unsigned (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

// As above. Of 32 k, warp w and lane l hold k l % 4 * 4 and the next three of rows 16 * w + l / 4 (a[0]) and 8 more
// (a[1]), and of the same rows 16 k further (a[2], a[3]).
template <bool kAdd>
__device__ inline void multiply_planes(float (&d)[8], const unsigned (&a)[4], unsigned long long b) {
  BLINK_MULTIPLY_PLANES(16, 8, "%8, %9, %10, %11", 12, 13);
}

template <bool kAdd>
__device__ inline void multiply_planes(float (&d)[16], const unsigned (&a)[4], unsigned long long b) {
  BLINK_MULTIPLY_PLANES(32, 16, "%16, %17, %18, %19", 20, 21);
}

template <bool kAdd>
__device__ inline void multiply_planes(float (&d)[32], const unsigned (&a)[4], unsigned long long b) {
  BLINK_MULTIPLY_PLANES(64, 32, "%32, %33, %34, %35", 36, 37);
}

template <bool kAdd>
__device__ inline void multiply_planes(float (&d)[64], const unsigned (&a)[4], unsigned long long b) {
  BLINK_MULTIPLY_PLANES(128, 64, "%64, %65, %66, %67", 68, 69);
}

#undef BLINK_MULTIPLY_PLANES

}  // namespace blink
