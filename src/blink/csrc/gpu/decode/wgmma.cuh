// SPDX-License-Identifier: Apache-2.0
// Hopper's warpgroup products, of boxes in shared memory. Kernels that use these are compiled for sm_90a.
#pragma once

#include "tensor_copy.cuh"

namespace blink {

// The descriptor of a box, whose rows are of 128 bytes, eight of them 1,024 bytes from the next eight. 16 k further is
// + 2.
__device__ inline unsigned long long describe_box(const void* box) {
  return (unsigned long long)(shared_address(box) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ inline void fence_products() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ inline void commit_products() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Wait until at most so many of the groups of products are under way.
template <int kGroups>
__device__ inline void wait_for_products() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
#endif
}

// Have sums read behind what stands before.
template <int kCount>
__device__ inline void keep(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

// Add the products of 64 rows of a with the tokens of b over 16 k. Warp w of the four and lane l hold rows 16 * w + l /
// 4 (sums 0 and 1 of four) and 8 more (2 and 3); of each 8 tokens, a quadruple of sums, l % 4 * 2 and the next.
__device__ inline void multiply_boxes(float (&d)[4], unsigned long long a, unsigned long long b) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n .reg .pred add;\n setp.eq.u32 add, 1, 1;\n wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, "
      "%3}, %4, %5, add, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b));
#endif
}

__device__ inline void multiply_boxes(float (&d)[8], unsigned long long a, unsigned long long b) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n .reg .pred add;\n setp.eq.u32 add, 1, 1;\n wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, "
      "%2, %3, %4, %5, %6, %7}, %8, %9, add, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "l"(a), "l"(b));
#endif
}

__device__ inline void multiply_boxes(float (&d)[16], unsigned long long a, unsigned long long b) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n .reg .pred add;\n setp.eq.u32 add, 1, 1;\n wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, "
      "%2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15}, %16, %17, add, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b));
#endif
}

__device__ inline void multiply_boxes(float (&d)[32], unsigned long long a, unsigned long long b) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n .reg .pred add;\n setp.eq.u32 add, 1, 1;\n wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, "
      "%2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, "
      "1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b));
#endif
}

}  // namespace blink
