// SPDX-License-Identifier: Apache-2.0
// What the scheduler's block works with, in shared memory.
#pragma once

#include "gpu/program.h"
#include "scheduler/scheduler.h"

namespace blink {

constexpr uint32_t kLanes = kDeviceLanes;
constexpr uint32_t kNearQueuePairs = 32;  // how many of them, and of rows, have a place in shared memory
constexpr uint32_t kNearRows = 256;
constexpr uint32_t kBoxAlignment = 16;

// Between two steps the model's weights drive everything else out of every cache, but not out of here. This is the only
// copy that is kept up to date; program and state take it back before the kernel ends.
struct Near {
  DeviceProgram program;
  State state;
  StepGraphs graphs[kMaxGraphs];
  QueuePairState qps[kNearQueuePairs];
  NextRow next_rows[kNearRows];
  alignas(kBoxAlignment) uint64_t boxes[kLanes];  // for collectives
  uint64_t seen_step;                             // whose end watch_step() saw last
  // watch_step(): the end was seen, or a pass is wanted; writer: the thread that watches.
  uint32_t is_over;
  uint32_t wants_pass;  // writer, but for the reset: the warp that looks
};
__shared__ Near near;
static_assert(sizeof(Near) <= 48 << 10, "static shared memory ends there");
static_assert(sizeof(NextRow) % 16 == 8, "rows that lanes read at once lie in different banks");

// Copy structs with all lanes, which are then in step.
template <class T>
__device__ __noinline__ void copy(T* to, const T* from, uint32_t count) {
  static_assert(sizeof(T) % 4 == 0);
  auto* words = reinterpret_cast<uint32_t*>(to);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < count * uint32_t(sizeof(T) / 4); i += kLanes)
    words[i] = reinterpret_cast<const uint32_t*>(from)[i];
  __syncthreads();
}

__device__ inline bool has_near_queue_pairs(const Geometry& g) { return g.num_queue_pairs <= kNearQueuePairs; }
__device__ inline bool has_near_rows(const Geometry& g) { return g.max_num_seqs <= kNearRows; }

// Bring program and state to shared memory, and of the state's arrays what a pass looks at first.
__device__ void take_over(const DeviceProgram* program) {
  copy(&near.program, program, 1);
  copy(&near.state, near.program.state, 1);
  const Geometry& g = near.state.geometry;
  copy(near.graphs, near.program.graphs, g.num_graphs);
  if (has_near_queue_pairs(g)) copy(near.qps, near.state.qps, g.num_queue_pairs);
  if (has_near_rows(g)) copy(near.next_rows, near.state.next_rows, g.max_num_seqs);
  if (threadIdx.x == 0) {
    if (has_near_queue_pairs(g)) near.state.qps = near.qps;
    if (has_near_rows(g)) near.state.next_rows = near.next_rows;
    near.seen_step = 0;
  }
  __syncthreads();
}

// Write everything back, for the next kernel.
__device__ void hand_over(DeviceProgram* program) {
  State& home = *near.program.state;
  const Geometry& g = near.state.geometry;
  __syncthreads();
  if (threadIdx.x == 0) {
    near.state.qps = home.qps;
    near.state.next_rows = home.next_rows;
  }
  __syncthreads();
  if (has_near_queue_pairs(g)) copy(near.state.qps, near.qps, g.num_queue_pairs);
  if (has_near_rows(g)) copy(near.state.next_rows, near.next_rows, g.max_num_seqs);
  copy(&home, &near.state, 1);
  copy(program, &near.program, 1);
}

}  // namespace blink
