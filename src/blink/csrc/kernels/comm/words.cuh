// SPDX-License-Identifier: Apache-2.0
// What ranks' exchanges ask of a GPU by its own words; tests/native has others for threads of a host.
#pragma once

namespace blink {

constexpr int kThreads = 512;        // of a block
constexpr int kSpreadThreads = 256;  // of a block of a cluster that has a row

__device__ inline unsigned long long read_clock() {
  unsigned long long ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

__device__ inline uint4 load_line(const uint4* from) {
  uint4 line;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(line.x), "=r"(line.y), "=r"(line.z), "=r"(line.w)
               : "l"(from)
               : "memory");
  return line;
}

__device__ inline void store_line(uint4* to, uint2 data, unsigned number) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(data.x), "r"(number), "r"(data.y),
               "r"(number)
               : "memory");
}

__device__ inline float float_of_half(unsigned short bits) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
  return wide;
}

__device__ inline unsigned short half_of_float(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

}  // namespace blink
