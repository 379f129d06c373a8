// SPDX-License-Identifier: Apache-2.0
// Hopper's warpgroup MMAs (wgmma) of FP8, both operands in shared memory.
#pragma once

#include "kernels/common/wgmma.cuh"

namespace blink {

// As multiply_boxes() of e4m3 over 32 k; without kAdd the sums begin here.
template <bool kAdd>
__device__ inline void multiply_fp8(float (&d)[8], unsigned long long a, unsigned long long b) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n .reg .pred add;\n setp.ne.b32 add, %10, 0;\n wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, add, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "l"(a), "l"(b), "n"(int(kAdd)));
#endif
}

template <bool kAdd>
__device__ inline void multiply_fp8(float (&d)[16], unsigned long long a, unsigned long long b) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n .reg .pred add;\n setp.ne.b32 add, %18, 0;\n wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, add, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "n"(int(kAdd)));
#endif
}

template <bool kAdd>
__device__ inline void multiply_fp8(float (&d)[32], unsigned long long a, unsigned long long b) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n .reg .pred add;\n setp.ne.b32 add, %34, 0;\n wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "n"(int(kAdd)));
#endif
}

}  // namespace blink
