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
#include <functional>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

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
inline thread_local float* block_lanes;  // what the lanes of its one warp hand to each other

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline void __threadfence_system() {}  // barriers, acquires and releases are all that a host's threads are ordered by
inline float rsqrtf(float value) { return 1 / std::sqrt(value); }
inline float __shfl_xor_sync(unsigned, float value, int mask) {
  block_lanes[threadIdx.x] = value;
  __syncthreads();
  const float found = block_lanes[threadIdx.x ^ unsigned(mask)];
  __syncthreads();
  return found;
}

namespace blink {

using std::max;
using std::min;

constexpr int kThreads = 32, kSpreadThreads = 32;  // of a block
inline int clock_slowness = 20;                    // a host that is busy with others may keep a thread for seconds

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
inline thread_local std::function<void()> prerequisites;  // runs the kernel in front to its end, if there is one
inline void wait_for_prerequisites() {
  if (prerequisites) prerequisites();
}

// A cluster: its barrier, and each block's shared memory.
struct Cluster {
  explicit Cluster(int threads) : barrier(threads) {}
  std::barrier<> barrier;
  std::vector<char*> memory;
};
inline thread_local Cluster* cluster;
inline thread_local unsigned block_rank;  // in it
inline thread_local std::optional<std::barrier<>::arrival_token> arrival;

inline unsigned cluster_rank() { return block_rank; }
inline void cluster_arrive_relaxed() { arrival.emplace(cluster->barrier.arrive()); }
inline void cluster_wait() {
  cluster->barrier.wait(std::move(*arrival));
  arrival.reset();
}

using Barrier = uint64_t;  // bytes that are yet to come
inline std::atomic_ref<uint64_t> bytes_of(Barrier& barrier) { return std::atomic_ref<uint64_t>(barrier); }
inline void initialize(Barrier& barrier, unsigned) { bytes_of(barrier).store(0, std::memory_order_relaxed); }
inline void expect(Barrier& barrier, unsigned bytes) { bytes_of(barrier).store(bytes, std::memory_order_relaxed); }
inline void publish_barriers() {}

// The same place in another block's shared memory.
template <class T>
inline T& find_in_block(unsigned rank, T& own) {
  return *reinterpret_cast<T*>(cluster->memory[rank] + (reinterpret_cast<char*>(&own) - cluster->memory[block_rank]));
}
template <int kCluster, class T>
inline void send(int to, T value, T& place, Barrier& counter) {
  find_in_block(to, place) = value;
  bytes_of(find_in_block(to, counter)).fetch_sub(sizeof(T), std::memory_order_release);
}
template <int kCluster>
inline void receive(Barrier& counter) {
  while (bytes_of(counter).load(std::memory_order_acquire) != 0) std::this_thread::yield();
}

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
