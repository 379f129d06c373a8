// SPDX-License-Identifier: Apache-2.0
// A GPU's threads on a CPU's: each is a fiber, and one of them runs at a time until it waits for others. Which goes on
// first is drawn, so that what must not hang on it is seen not to. Device code is compiled as it is, but for the
// headers of this folder, which stand for those of its instructions.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __align__(bytes)
#define __grid_constant__
#define __launch_bounds__(...)

namespace emulated {

struct Index {
  int x = 0, y = 0, z = 0;
};

constexpr int kLanes = 32, kWords = 8;
constexpr size_t kStack = 128 << 10;

struct Meeting {  // of threads that wait for each other
  int arrived = 0;
  uint64_t round = 0;
};

struct Warp {
  uint64_t words[2][kLanes][kWords];  // what lanes show each other, of this round and the one before
  Meeting meeting;
};

struct Block {
  Meeting all, some;
};

struct Fiber {
  ucontext_t start;
  jmp_buf place;
  std::unique_ptr<char[]> stack;
  Index thread, block;
  Warp* warp;
  Block* own;
  bool started = false, ended = false;
};

inline Fiber* current;
inline jmp_buf scheduler;
inline Index grid, threads;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "block %d, thread %d: %s\n", current->block.x, current->thread.x, what);
  std::abort();
}

// Let another thread go on.
inline void yield() {
  if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
}

inline void meet(Meeting& meeting, int count) {
  const uint64_t round = meeting.round;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    meeting.round++;
  } else {
    while (meeting.round == round) yield();
  }
}

// Show the warp some words; return those of all lanes.
template <size_t kCount>
const uint64_t (&show(const std::array<uint64_t, kCount>& words)) [kLanes][kWords] {
  static_assert(kCount <= kWords);
  Warp& warp = *current->warp;
  auto& shown = warp.words[warp.meeting.round % 2];
  std::copy(words.begin(), words.end(), shown[current->thread.x % kLanes]);
  meet(warp.meeting, kLanes);
  return shown;
}

inline const std::function<void()>* body;

inline void begin() {
  (*body)();
  current->ended = true;
  _longjmp(scheduler, 1);
}

// Run a grid to its end, in an order that a seed draws: each time that warps may go on, some are left out.
inline void run(Index blocks, int threads_of_each, const std::function<void()>& run_thread, unsigned seed) {
  grid = blocks, threads = {threads_of_each, 1, 1}, body = &run_thread;
  const int warps_of_each = threads_of_each / kLanes, count = blocks.x * blocks.y * threads_of_each;
  std::vector<Fiber> fibers(count);
  std::vector<Warp> warps(count / kLanes);
  std::vector<Block> places(blocks.x * blocks.y);
  for (int i = 0; i < count; i++) {
    Fiber& fiber = fibers[i];
    const int block = i / threads_of_each;
    fiber.thread.x = i % threads_of_each;
    fiber.block = {block % blocks.x, block / blocks.x, 0};
    fiber.warp = &warps[i / kLanes], fiber.own = &places[block];
    fiber.stack = std::make_unique<char[]>(kStack);
  }
  std::mt19937 random(seed);
  std::vector<int> order(blocks.x * blocks.y * warps_of_each);
  for (size_t i = 0; i < order.size(); i++) order[i] = int(i);
  for (bool left = true; left;) {
    left = false;
    std::shuffle(order.begin(), order.end(), random);
    for (const int warp : order) {
      const bool waits = seed % 2 && random() % 4;
      for (int lane = 0; lane < kLanes; lane++) {
        Fiber& fiber = fibers[size_t(warp) * kLanes + lane];
        if (fiber.ended) continue;
        left = true;
        if (waits) break;
        current = &fiber;
        if (_setjmp(scheduler) != 0) continue;
        if (fiber.started) _longjmp(fiber.place, 1);
        fiber.started = true;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = fiber.stack.get(), fiber.start.uc_stack.ss_size = kStack;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, begin, 0);
        setcontext(&fiber.start);
      }
    }
  }
}

template <class T>
T exchange(T value, int lane) {
  std::array<uint64_t, 1> word{};
  std::memcpy(word.data(), &value, sizeof value);
  T found;
  std::memcpy(&found, show(word)[lane], sizeof found);
  return found;
}

inline int lane() { return current->thread.x % kLanes; }

}  // namespace emulated

#define threadIdx (emulated::current->thread)
#define blockIdx (emulated::current->block)
#define gridDim (emulated::grid)
#define blockDim (emulated::threads)

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};

// The functions that CUDA C++ brings.
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulated::exchange(value, lane % emulated::kLanes);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulated::exchange(value, emulated::lane() ^ mask);
}
template <class T>
T __shfl_down_sync(unsigned, T value, int by) {
  return emulated::exchange(value, std::min(emulated::lane() + by, emulated::kLanes - 1));
}
template <class T>
T __shfl_up_sync(unsigned, T value, int by) {
  return emulated::exchange(value, std::max(emulated::lane() - by, 0));
}
inline void __syncwarp() { emulated::show<1>({0}); }
inline void __syncthreads() { emulated::meet(emulated::current->own->all, emulated::threads.x); }

inline unsigned __ballot_sync(unsigned, bool holds) {
  const auto& shown = emulated::show<1>({holds});
  unsigned word = 0;
  for (int i = 0; i < emulated::kLanes; i++) word |= unsigned(shown[i][0]) << i;
  return word;
}

inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  const auto& shown = emulated::show<1>({value});
  unsigned most = 0;
  for (const auto& words : shown) most = std::max(most, unsigned(words[0]));
  return most;
}

inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  const auto& shown = emulated::show<1>({value});
  unsigned all = 0;
  for (const auto& words : shown) all |= unsigned(words[0]);
  return all;
}

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __cvta_generic_to_shared(const void*) { return 0; }
inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline float __expf(float value) { return std::exp(value); }
inline float rsqrtf(float value) { return 1 / std::sqrt(value); }
inline float __fdividef(float a, float b) { return a / b; }
[[noreturn]] inline void __trap() { emulated::fail("trap"); }
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffff, b & 0xffff);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = uint64_t(b) << 32 | a;
  unsigned word = 0;
  for (int i = 0; i < 4; i++) word |= unsigned(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return word;
}
template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
  return std::min<std::common_type_t<A, B>>(a, b);
}
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
  return std::max<std::common_type_t<A, B>>(a, b);
}
