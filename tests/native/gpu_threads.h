// SPDX-License-Identifier: Apache-2.0
// A cluster of thread blocks on the host's threads: the words of CUDA C++ and of ptx.cuh that device code under test
// uses. Threads are ordered by barriers alone, as on a GPU.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Index {
  unsigned x, y;
};

// One block: its shared memory, its barrier, and what the lanes of its warps hand to each other.
struct Block {
  Block(int threads, size_t bytes) : memory(bytes + 16), barrier(threads), lanes(threads) {
    for (int warp = 0; warp < threads / 32; warp++) warps.push_back(std::make_unique<std::barrier<>>(32));
  }
  char* shared() { return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 15) & ~uintptr_t(15)); }

  std::vector<char> memory;
  std::barrier<> barrier;
  std::vector<std::unique_ptr<std::barrier<>>> warps;
  std::vector<uint32_t> lanes;
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  std::unique_ptr<std::barrier<>> barrier;
};

inline Cluster cluster;
inline thread_local Index threadIdx, blockIdx;
inline thread_local Block* block;
inline thread_local unsigned block_rank;  // in its cluster
inline thread_local std::optional<std::barrier<>::arrival_token> arrival;

// Run a kernel of one row: a cluster of blocks.
template <class Kernel>
inline void run_cluster(int blocks, int threads, size_t shared_bytes, Kernel kernel) {
  cluster.blocks.clear();
  for (int i = 0; i < blocks; i++) cluster.blocks.push_back(std::make_unique<Block>(threads, shared_bytes));
  cluster.barrier = std::make_unique<std::barrier<>>(blocks * threads);
  std::vector<std::thread> all;
  for (int i = 0; i < blocks * threads; i++)
    all.emplace_back([&, i] {
      blockIdx = {unsigned(i / threads), 0};
      threadIdx = {unsigned(i % threads), 0};
      block = cluster.blocks[blockIdx.x].get();
      block_rank = blockIdx.x;
      kernel();
      cluster.barrier->arrive_and_drop();  // nobody waits for a thread that has ended
    });
  for (std::thread& thread : all) thread.join();
}

template <class To, class From>
inline To cast_bits(From from) {
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// The value of another lane of the warp.
template <class T>
inline T exchange(T value, unsigned lane) {
  std::barrier<>& warp = *block->warps[threadIdx.x / 32];
  block->lanes[threadIdx.x] = cast_bits<uint32_t>(value);
  warp.arrive_and_wait();
  const T found = cast_bits<T>(block->lanes[threadIdx.x / 32 * 32 + lane]);
  warp.arrive_and_wait();
  return found;
}

template <class T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
  return exchange(value, threadIdx.x % 32 ^ unsigned(mask));
}
template <class T>
inline T __shfl_up_sync(unsigned, T value, unsigned step) {
  const unsigned lane = threadIdx.x % 32;
  return exchange(value, lane >= step ? lane - step : lane);
}
inline void __syncthreads() { block->barrier.arrive_and_wait(); }

inline float __uint_as_float(uint32_t bits) { return cast_bits<float>(bits); }
inline uint32_t __float_as_uint(float value) { return cast_bits<uint32_t>(value); }
inline uint32_t __float2uint_rn(float value) { return uint32_t(std::nearbyint(value)); }

template <class T, class Better>
inline void replace_if(T& word, T value, Better better) {
  std::atomic_ref<T> shared(word);
  T old = shared.load(std::memory_order_relaxed);
  while (better(value, old) && !shared.compare_exchange_weak(old, value, std::memory_order_relaxed)) {
  }
}
inline uint32_t atomicAdd(uint32_t* word, uint32_t value) {
  return std::atomic_ref<uint32_t>(*word).fetch_add(value, std::memory_order_relaxed);
}
inline uint32_t atomicOr(uint32_t* word, uint32_t bits) {
  return std::atomic_ref<uint32_t>(*word).fetch_or(bits, std::memory_order_relaxed);
}
template <class T>
inline void atomicMax(T* word, T value) {
  replace_if(*word, value, std::greater<T>());
}
template <class T>
inline void atomicMin(T* word, T value) {
  replace_if(*word, value, std::less<T>());
}

namespace blink {

using std::max;
using std::min;

struct Bf16 {
  unsigned short bits;
};
inline float low_float(unsigned pair) { return __uint_as_float(pair << 16); }
inline float high_float(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }
inline float to_float(Bf16 value) { return low_float(value.bits); }
inline float low_half(unsigned pair) { return float(cast_bits<_Float16>(uint16_t(pair))); }
inline float max_or_nan(float a, float b) { return a != a || b != b ? std::nanf("") : std::max(a, b); }
inline float exp2_fast(float exponent) { return std::exp2(exponent); }
inline float silu(float x) { return x / (1 + std::exp(-x)); }

inline void launch_dependents() {}
inline void wait_for_prerequisites() {}
inline unsigned cluster_rank() { return block_rank; }
inline void cluster_arrive() { arrival.emplace(cluster.barrier->arrive()); }
inline void cluster_arrive_relaxed() { cluster_arrive(); }
inline void cluster_wait() {
  cluster.barrier->wait(std::move(*arrival));
  arrival.reset();
}

// An address in a cluster's shared memory: the block's rank, and the place in that block's.
inline unsigned address_in(unsigned rank, const void* own) {
  return rank << 24 | unsigned(static_cast<const char*>(own) - block->shared());
}
template <class T>
inline T& find_in_cluster(unsigned address) {
  return *reinterpret_cast<T*>(cluster.blocks[address >> 24]->shared() + (address & 0xffffff));
}
template <class T>
inline void store_in_cluster(unsigned address, T value) {
  find_in_cluster<T>(address) = value;
}
inline uint32_t add_in_cluster(unsigned address, uint32_t value) {
  return atomicAdd(&find_in_cluster<uint32_t>(address), value);
}
inline void lower_in_cluster(unsigned address, uint32_t value) {
  replace_if(find_in_cluster<uint32_t>(address), value, std::less<uint32_t>());
}

}  // namespace blink
