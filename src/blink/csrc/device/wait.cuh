// SPDX-License-Identifier: Apache-2.0
// The scheduler's block waits here: for the end of a step, or for work.
#pragma once

#include "device/device_env.cuh"

namespace blink {

constexpr uint64_t kIdlePassNs = 5000000;  // the longest time between two passes: heartbeat, leases, the engine's words
constexpr uint64_t kBusyPassNs = 1000000;  // the same while a step runs
// Between looks at the frontends' words while a step runs. Each look is one load of four words: three loads of a word
// slowed every kernel of a step, by a sixth at one row.
constexpr uint64_t kLookNs = 5000;
constexpr uint64_t kKeepNs = 10000;  // between touches of what the end of a step is expected to read

__device__ inline void keep(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Keep in the L2 cache what composing a step reads of its sequences, but of many only the first, for a barrier waits
// for this. Runs on: the lanes from `first` on.
__device__ void keep_sequences(const State& s, uint32_t first) {
  const Geometry& g = s.geometry;
  constexpr uint32_t kLine = 128, kMost = 2 * kLanes;
  const uint32_t count = least(s.num_running + s.num_waiting, kMost);
#pragma unroll 1
  for (uint32_t i = threadIdx.x - first; i < count; i += kLanes - first) {
    const Sequence& q = s.sequences[i < s.num_running ? s.running[i] : s.waiting[i - s.num_running]];
    for (uint32_t at = 0; at < sizeof(Sequence); at += kLine) keep(reinterpret_cast<const uint8_t*>(&q) + at);
    keep(&flow_of(s, q));
    if (q.slot == kNone) continue;
    keep(s.stop_tokens + uint64_t(q.slot) * kMaxStopTokens);
    keep(s.tokens + uint64_t(q.slot) * g.max_model_len + q.num_computed);
    keep(block_table(s, q.slot) + q.num_computed / g.block_size);
    if (has_windows(s)) keep(window_table(s, q.slot) + q.num_computed / g.block_size);
  }
}

// Wait for the end of the launch in flight, for a frontend's news, or until a pass is due. One thread polls the end;
// another warp polls the frontends' words now and then, each time a round trip to the host that the thread must not
// make. Where the next step will have to be composed the others keep what that takes out of the model's way; else they
// wait at the barrier, which costs no issue slots.
__device__ void wait_for_step(const State& s) {
  volatile uint32_t &is_over = shared.is_over, &wants_pass = shared.wants_pass;
  if (threadIdx.x == 0) {
    is_over = 0;
    wants_pass = 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint64_t& done = output_in_flight(s).done_step;
    bool is_seen = false;
    while (!is_seen && !wants_pass) is_seen = load_acquire(done) == s.step;
    if (is_seen) shared.seen_step = s.step;
    is_over = 1;
  } else if (threadIdx.x / kWarpLanes == 1) {
    const uint64_t begin = DeviceEnv::now();
    uint64_t looked = begin;
    bool wakes = false;
    while (__any_sync(0xffffffffu, wakes || is_over) == 0) {
      __nanosleep(100);
      const uint64_t now = DeviceEnv::now();
      wakes = now - begin > kBusyPassNs;
      if (__any_sync(0xffffffffu, now - looked < kLookNs)) continue;
      for (uint32_t qp = threadIdx.x % kWarpLanes; qp < s.geometry.num_queue_pairs; qp += kWarpLanes)
        wakes |= has_news(s, qp);
      looked = now;
    }
    if (threadIdx.x == kWarpLanes) wants_pass = 1;
  } else if (!s.fast_path_ready || s.num_waiting > 0) {
    for (uint64_t kept = 0; !is_over;) {
      if (DeviceEnv::now() - kept >= kKeepNs) {
        keep_sequences(s, 2 * kWarpLanes);
        kept = DeviceEnv::now();
      }
      __nanosleep(200);
    }
  }
  __syncthreads();
}

// Wait until a frontend has news, a copy is over, a pass is due or a hold ends. One warp polls; the others
// wait at the barrier, which costs no issue slots.
__device__ inline void doze(const State& s) {
  if (threadIdx.x < kWarpLanes) {
    uint64_t due = DeviceEnv::now() + kIdlePassNs;
    if (s.held_until_ns > 0) due = least(due, s.held_until_ns);
    bool wakes = false;
    while (__any_sync(0xffffffffu, wakes) == 0) {
      __nanosleep(shared.program.idle_sleep_ns);
      wakes = DeviceEnv::now() >= due || is_copy_over(s);
      for (uint32_t qp = threadIdx.x; qp < s.geometry.num_queue_pairs; qp += kWarpLanes) wakes |= has_news(s, qp);
    }
  }
  __syncthreads();
}

}  // namespace blink
