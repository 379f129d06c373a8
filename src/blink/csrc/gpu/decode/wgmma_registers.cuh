// SPDX-License-Identifier: Apache-2.0
// Hopper's warpgroup products of f16 whose first operand lies in registers.
#pragma once

#include "wgmma.cuh"

namespace blink {

// Have these registers written before what follows.
__device__ inline void keep(unsigned (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

// As multiply_boxes(). Of 16 k, warp w and lane l hold k l % 4 * 2 and the next of rows 16 * w + l / 4 (a[0]) and 8
// more (a[1]), and of the same rows 8 k further (a[2], a[3]).
__device__ inline void multiply_registers(float (&d)[4], const unsigned (&a)[4], unsigned long long b) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n .reg .pred add;\n setp.eq.u32 add, 1, 1;\n wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, "
      "%3}, {%4, %5, %6, %7}, %8, add, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}

__device__ inline void multiply_registers(float (&d)[8], const unsigned (&a)[4], unsigned long long b) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n .reg .pred add;\n setp.eq.u32 add, 1, 1;\n wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, "
      "%2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, add, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}

__device__ inline void multiply_registers(float (&d)[16], const unsigned (&a)[4], unsigned long long b) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n .reg .pred add;\n setp.eq.u32 add, 1, 1;\n wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, "
      "%2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, add, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}

__device__ inline void multiply_registers(float (&d)[32], const unsigned (&a)[4], unsigned long long b) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n .reg .pred add;\n setp.eq.u32 add, 1, 1;\n wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, "
      "%2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
      "%26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}

}  // namespace blink
