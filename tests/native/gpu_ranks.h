// SPDX-License-Identifier: Apache-2.0
// Words of CUDA C++, of comm/words.cuh and of ptx.cuh for kernels that several ranks run at once on a host's threads.
// A line is two words of 64 bits, each stored at once, as NVLink does it at the least.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>

#define __device__
#define __global__
#define __shared__
#define __launch_bounds__(...)

struct Index {
  unsigned x;
};
struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline thread_local Index threadIdx, blockIdx, gridDim;
inline thread_local std::barrier<>* block_barrier;

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline void __threadfence_system() {}  // barriers, acquires and releases are all that a host's threads are ordered by
inline float rsqrtf(float value) { return 1 / std::sqrt(value); }
template <class T>
inline T __shfl_xor_sync(unsigned, T value, int) {
  return value;  // no norm is computed here
}

namespace blink {

using std::max;
using std::min;

constexpr int kThreads = 32;     // of a block
inline int clock_slowness = 20;  // a host that is busy with others may keep a thread for seconds

struct Bf16 {
  unsigned short bits;
};
inline float to_float(Bf16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}
inline Bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline float float_of_half(unsigned short bits) {
  _Float16 half;
  std::memcpy(&half, &bits, sizeof(half));
  return float(half);
}
inline unsigned short half_of_float(float value) {
  const _Float16 half = _Float16(value);
  unsigned short bits;
  std::memcpy(&bits, &half, sizeof(bits));
  return bits;
}

inline void launch_dependents() {}
inline void wait_for_prerequisites() {}

inline unsigned long long read_clock() {
  std::this_thread::yield();  // who waits looks at it: there are fewer cores than threads
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1) / clock_slowness;
}

inline std::atomic_ref<uint64_t> half_line(const uint4* line, int half) {
  return std::atomic_ref<uint64_t>(reinterpret_cast<uint64_t*>(const_cast<uint4*>(line))[half]);
}
inline uint4 load_line(const uint4* from) {
  static thread_local unsigned calls = threadIdx.x;
  if (++calls % 61 == 0) std::this_thread::sleep_for(std::chrono::microseconds(500));  // while others go on
  const uint64_t first = half_line(from, 0).load(std::memory_order_relaxed);
  const uint64_t second = half_line(from, 1).load(std::memory_order_relaxed);
  return {unsigned(first), unsigned(first >> 32), unsigned(second), unsigned(second >> 32)};
}
inline void store_line(uint4* to, uint2 data, unsigned number) {
  half_line(to, 1).store(uint64_t(number) << 32 | data.y, std::memory_order_relaxed);
  half_line(to, 0).store(uint64_t(number) << 32 | data.x, std::memory_order_relaxed);
}

}  // namespace blink
