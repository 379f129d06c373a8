// SPDX-License-Identifier: Apache-2.0
// Hopper's warpgroup MMAs (wgmma), of boxes in shared memory. Kernels that use these are compiled for sm_90a.
#pragma once

#include "kernels/common/tensor_copy.cuh"

namespace blink {

// The descriptor of a box, whose rows are of 128 bytes, eight of them 1,024 bytes from the next eight. 16 k further is
// + 2.
__device__ inline unsigned long long describe_box(const void* box) {
  return (unsigned long long)(shared_address(box) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ inline void fence_wgmma() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ inline void commit_wgmma() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Wait until at most so many of the groups of products are under way.
template <int kGroups>
__device__ inline void wait_for_wgmma() {
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

// Have these registers written before what follows.
__device__ inline void keep(unsigned (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

// The names and operands of sums in assembly.
#define BLINK_NAMES_4 "%0, %1, %2, %3"
#define BLINK_NAMES_8 BLINK_NAMES_4 ", %4, %5, %6, %7"
#define BLINK_NAMES_12 BLINK_NAMES_8 ", %8, %9, %10, %11"
#define BLINK_NAMES_16 BLINK_NAMES_12 ", %12, %13, %14, %15"
#define BLINK_NAMES_24 BLINK_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define BLINK_NAMES_32 BLINK_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define BLINK_NAMES_40 BLINK_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define BLINK_NAMES_48 BLINK_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define BLINK_NAMES_56 BLINK_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define BLINK_NAMES_64 BLINK_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define BLINK_NAMES_80 BLINK_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define BLINK_NAMES_96 BLINK_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define BLINK_NAMES_112 \
  BLINK_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define BLINK_NAMES_128 \
  BLINK_NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define BLINK_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define BLINK_SUMS_8(i) BLINK_SUMS_4(i), BLINK_SUMS_4(i + 4)
#define BLINK_SUMS_12(i) BLINK_SUMS_8(i), BLINK_SUMS_4(i + 8)
#define BLINK_SUMS_16(i) BLINK_SUMS_12(i), BLINK_SUMS_4(i + 12)
#define BLINK_SUMS_24(i) BLINK_SUMS_16(i), BLINK_SUMS_8(i + 16)
#define BLINK_SUMS_32(i) BLINK_SUMS_24(i), BLINK_SUMS_8(i + 24)
#define BLINK_SUMS_40(i) BLINK_SUMS_32(i), BLINK_SUMS_8(i + 32)
#define BLINK_SUMS_48(i) BLINK_SUMS_40(i), BLINK_SUMS_8(i + 40)
#define BLINK_SUMS_56(i) BLINK_SUMS_48(i), BLINK_SUMS_8(i + 48)
#define BLINK_SUMS_64(i) BLINK_SUMS_56(i), BLINK_SUMS_8(i + 56)
#define BLINK_SUMS_80(i) BLINK_SUMS_64(i), BLINK_SUMS_16(i + 64)
#define BLINK_SUMS_96(i) BLINK_SUMS_80(i), BLINK_SUMS_16(i + 80)
#define BLINK_SUMS_112(i) BLINK_SUMS_96(i), BLINK_SUMS_16(i + 96)
#define BLINK_SUMS_128(i) BLINK_SUMS_112(i), BLINK_SUMS_16(i + 112)

// The operands that a is where it is in registers.
#define BLINK_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

// The instruction for so many tokens; the operands behind the sums are named, those of a given. transposed: of each
// operand in shared memory, 0.
#if __CUDA_ARCH_FEAT_SM90_ALL
#define BLINK_MULTIPLY(tokens, sums, a_names, b_name, transposed, ...)                                                \
  asm volatile("{\n .reg .pred add;\n setp.eq.u32 add, 1, 1;\n wgmma.mma_async.sync.aligned.m64n" #tokens             \
               "k16.f32.bf16.bf16 {" BLINK_NAMES_##sums "}, " a_names ", %" #b_name ", add, 1, 1, " transposed ";\n}" \
               : BLINK_SUMS_##sums(0)                                                                                 \
               : __VA_ARGS__, "l"(b))
#else
#define BLINK_MULTIPLY(tokens, sums, a_names, b_name, transposed, ...)
#endif
#define BLINK_MULTIPLY_BOXES(tokens, sums, a_name, b_name) \
  BLINK_MULTIPLY(tokens, sums, "%" #a_name, b_name, "0, 0", "l"(a))
#define BLINK_MULTIPLY_ROWS(tokens, sums, a_names, b_name) \
  BLINK_MULTIPLY(tokens, sums, "{" a_names "}", b_name, "0", BLINK_REGISTERS)

// Add the products of 64 rows of a with the tokens of b over 16 k. Warp w of the four and lane l hold rows 16 * w + l /
// 4 (sums 0 and 1 of four) and 8 more (2 and 3); of each 8 tokens, a quadruple of sums, l % 4 * 2 and the next.
__device__ inline void multiply_boxes(float (&d)[4], unsigned long long a, unsigned long long b) {
  BLINK_MULTIPLY_BOXES(8, 4, 4, 5);
}

__device__ inline void multiply_boxes(float (&d)[8], unsigned long long a, unsigned long long b) {
  BLINK_MULTIPLY_BOXES(16, 8, 8, 9);
}

__device__ inline void multiply_boxes(float (&d)[12], unsigned long long a, unsigned long long b) {
  BLINK_MULTIPLY_BOXES(24, 12, 12, 13);
}

__device__ inline void multiply_boxes(float (&d)[16], unsigned long long a, unsigned long long b) {
  BLINK_MULTIPLY_BOXES(32, 16, 16, 17);
}

__device__ inline void multiply_boxes(float (&d)[24], unsigned long long a, unsigned long long b) {
  BLINK_MULTIPLY_BOXES(48, 24, 24, 25);
}

__device__ inline void multiply_boxes(float (&d)[32], unsigned long long a, unsigned long long b) {
  BLINK_MULTIPLY_BOXES(64, 32, 32, 33);
}

__device__ inline void multiply_boxes(float (&d)[40], unsigned long long a, unsigned long long b) {
  BLINK_MULTIPLY_BOXES(80, 40, 40, 41);
}

__device__ inline void multiply_boxes(float (&d)[48], unsigned long long a, unsigned long long b) {
  BLINK_MULTIPLY_BOXES(96, 48, 48, 49);
}

__device__ inline void multiply_boxes(float (&d)[56], unsigned long long a, unsigned long long b) {
  BLINK_MULTIPLY_BOXES(112, 56, 56, 57);
}

__device__ inline void multiply_boxes(float (&d)[64], unsigned long long a, unsigned long long b) {
  BLINK_MULTIPLY_BOXES(128, 64, 64, 65);
}

__device__ inline void multiply_boxes(float (&d)[80], unsigned long long a, unsigned long long b) {
  BLINK_MULTIPLY_BOXES(160, 80, 80, 81);
}

__device__ inline void multiply_boxes(float (&d)[96], unsigned long long a, unsigned long long b) {
  BLINK_MULTIPLY_BOXES(192, 96, 96, 97);
}

__device__ inline void multiply_boxes(float (&d)[112], unsigned long long a, unsigned long long b) {
  BLINK_MULTIPLY_BOXES(224, 112, 112, 113);
}

__device__ inline void multiply_boxes(float (&d)[128], unsigned long long a, unsigned long long b) {
  BLINK_MULTIPLY_BOXES(256, 128, 128, 129);
}

// The same with a in registers, named behind the sums. Warp w and lane l hold k l % 4 * 2 and the next of rows 16 * w +
// l / 4 (a[0]) and 8 more (a[1]), and of the same rows 8 k further (a[2], a[3]).
__device__ inline void multiply_rows(float (&d)[32], const unsigned (&a)[4], unsigned long long b) {
  BLINK_MULTIPLY_ROWS(64, 32, "%32, %33, %34, %35", 36);
}

__device__ inline void multiply_rows(float (&d)[40], const unsigned (&a)[4], unsigned long long b) {
  BLINK_MULTIPLY_ROWS(80, 40, "%40, %41, %42, %43", 44);
}

__device__ inline void multiply_rows(float (&d)[48], const unsigned (&a)[4], unsigned long long b) {
  BLINK_MULTIPLY_ROWS(96, 48, "%48, %49, %50, %51", 52);
}

__device__ inline void multiply_rows(float (&d)[56], const unsigned (&a)[4], unsigned long long b) {
  BLINK_MULTIPLY_ROWS(112, 56, "%56, %57, %58, %59", 60);
}

__device__ inline void multiply_rows(float (&d)[64], const unsigned (&a)[4], unsigned long long b) {
  BLINK_MULTIPLY_ROWS(128, 64, "%64, %65, %66, %67", 68);
}

__device__ inline void multiply_rows(float (&d)[80], const unsigned (&a)[4], unsigned long long b) {
  BLINK_MULTIPLY_ROWS(160, 80, "%80, %81, %82, %83", 84);
}

__device__ inline void multiply_rows(float (&d)[96], const unsigned (&a)[4], unsigned long long b) {
  BLINK_MULTIPLY_ROWS(192, 96, "%96, %97, %98, %99", 100);
}

__device__ inline void multiply_rows(float (&d)[112], const unsigned (&a)[4], unsigned long long b) {
  BLINK_MULTIPLY_ROWS(224, 112, "%112, %113, %114, %115", 116);
}

__device__ inline void multiply_rows(float (&d)[128], const unsigned (&a)[4], unsigned long long b) {
  BLINK_MULTIPLY_ROWS(256, 128, "%128, %129, %130, %131", 132);
}

#undef BLINK_MULTIPLY_ROWS
#undef BLINK_MULTIPLY_BOXES
#undef BLINK_MULTIPLY

}  // namespace blink
