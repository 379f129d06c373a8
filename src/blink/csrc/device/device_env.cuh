// SPDX-License-Identifier: Apache-2.0
// The scheduler's outside world on a GPU: a block of threads, CUDA's clock, and graphs launched from the device.
#pragma once

#include <cuda_device_runtime_api.h>

#include "device/plan_word.h"
#include "device/shared_state.cuh"

namespace blink {

constexpr uint32_t kWarpLanes = 32;
constexpr uint32_t kWarps = kLanes / kWarpLanes;

struct DeviceEnv {
  __device__ static uint32_t lane() { return threadIdx.x; }
  __device__ static uint32_t lanes() { return kLanes; }
  __device__ static void sync() { __syncthreads(); }
  __device__ static uint32_t fetch_add(uint32_t& word, uint32_t n) { return atomicAdd(&word, n); }
  __device__ static void raise(uint32_t& word, uint32_t n) { atomicMax(&word, n); }
  __device__ static uint64_t now() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
  }

  template <class T>
  __device__ static T share(T value) {
    static_assert(alignof(T) <= kBoxAlignment && sizeof(T) <= sizeof(shared.boxes));
    auto* box = reinterpret_cast<T*>(shared.boxes);
    if (threadIdx.x == 0) *box = value;
    __syncthreads();
    value = *box;
    __syncthreads();
    return value;
  }

  // Combine over all lanes: within each warp by shuffles, then over the warps through shared memory.
  template <class T, class Combine>
  __device__ __noinline__ static T reduce(T value, Combine combine) {
    for (uint32_t step = 16; step > 0; step /= 2) value = combine(value, shuffle_xor(value, step));
    auto* box = reinterpret_cast<T*>(shared.boxes);
    if (threadIdx.x % kWarpLanes == 0) box[threadIdx.x / kWarpLanes] = value;
    __syncthreads();
    value = box[0];
#pragma unroll 1
    for (uint32_t warp = 1; warp < kWarps; warp++) value = combine(value, box[warp]);
    __syncthreads();
    return value;
  }
  template <class T>
  __device__ static T sum(T value) {
    return reduce(value, [](T a, T b) { return a + b; });
  }
  template <class T>
  __device__ static T least(T value) {
    return reduce(value, [](T a, T b) { return b < a ? b : a; });
  }
  template <class T>
  __device__ static T most(T value) {
    return reduce(value, [](T a, T b) { return a < b ? b : a; });
  }
  __device__ static bool any(bool value) { return __syncthreads_or(value); }

  __device__ static uint32_t scan(uint32_t value, uint32_t& total) {
    const uint2 found = scan_words(value);
    total = found.y;
    return found.x;
  }

  // A kernel that breaks takes the context with it. What a step does report is a rank that is lost.
  __device__ static Outcome outcome(const StepOutput& output, uint64_t step) {
    const bool is_over = shared.seen_step == step || load_acquire(output.done_step) == step;
    if (!is_over) return Outcome::kRuns;
    return shared.program.num_followers > 0 && output.failed ? Outcome::kFailed : Outcome::kDone;
  }

  // Launch a step whole (segment kNone), or one of its segments.
  __device__ static bool launch(uint32_t graph, uint32_t segment) {
    // The batch, written by all lanes before the last sync, must be there when the graph starts.
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    tell_followers({uint32_t(shared.state.step), graph, segment});
    const StepGraphs& graphs = shared.graphs[graph];
    const uint32_t parity = shared.program.parity;
    if (segment == kNone) shared.program.parity = parity ^ 1;
    CUgraphExec_st* executable = segment == kNone ? graphs.whole[parity] : graphs.segments[segment];
    return cudaGraphLaunch(executable, cudaStreamGraphFireAndForget) == cudaSuccess;
  }

  // Copy while steps run. Where there is nothing to launch, all that could be copied is there.
  __device__ static bool copy(CopyOrder& copy) {
    if (shared.program.copies[0] == nullptr) {
      store_release(copy.done, copy.ordered);
      return true;
    }
    asm volatile("fence.acq_rel.gpu;" ::: "memory");  // the order is there when the graph starts
    shared.num_copies++;
    return cudaGraphLaunch(shared.program.copies[copy.ordered % 2], cudaStreamGraphFireAndForget) == cudaSuccess;
  }

  // Let the ranks on other GPUs launch what this one does.
  __device__ static void tell_followers(Plan plan) {
    if (shared.program.num_followers == 0) return;
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    for (uint32_t i = 0; i < shared.program.num_followers; i++)
      store_release(*shared.program.plan_words[i], pack_plan(plan));
  }

 private:
  // Sum of the lanes before (x) and of all (y).
  __device__ __noinline__ static uint2 scan_words(uint32_t value) {
    uint32_t inclusive = value;
    for (uint32_t step = 1; step < kWarpLanes; step *= 2) {
      const uint32_t left = __shfl_up_sync(0xffffffffu, inclusive, step);
      if (threadIdx.x % kWarpLanes >= step) inclusive += left;
    }
    auto* box = reinterpret_cast<uint32_t*>(shared.boxes);
    if (threadIdx.x % kWarpLanes == kWarpLanes - 1) box[threadIdx.x / kWarpLanes] = inclusive;
    __syncthreads();
    uint32_t before = 0, total = 0;
    for (uint32_t warp = 0; warp < kWarps; warp++) {
      if (warp < threadIdx.x / kWarpLanes) before += box[warp];
      total += box[warp];
    }
    __syncthreads();
    return {before + inclusive - value, total};
  }

  template <class T>
  __device__ static T shuffle_xor(T value, uint32_t step) {
    static_assert(sizeof(T) % 4 == 0, "values travel as words");
    uint32_t words[sizeof(T) / 4];
    memcpy(words, &value, sizeof(T));
    for (uint32_t& word : words) word = __shfl_xor_sync(0xffffffffu, word, step);
    memcpy(&value, words, sizeof(T));
    return value;
  }
};

}  // namespace blink
