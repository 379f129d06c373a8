// SPDX-License-Identifier: Apache-2.0
// The scheduler's working copy of its state, in shared memory.
#pragma once

#include "device/program.h"
#include "scheduler/scheduler.h"

namespace blink {

constexpr uint32_t kLanes = kDeviceLanes;
constexpr uint32_t kSharedQueuePairs = 32;  // how many of them, and of rows, have a place in shared memory
constexpr uint32_t kSharedRows = 256;
constexpr uint32_t kBoxAlignment = 16;

// Between two steps the model's weights drive everything else out of every cache, but not out of here. This is the only
// copy that is kept up to date; program and state take it back before the kernel ends.
struct SharedState {
  DeviceProgram program;
  State state;
  StepGraphs graphs[kMaxGraphs];
  QueuePairState qps[kSharedQueuePairs];
  NextRow next_rows[kSharedRows];
  alignas(kBoxAlignment) uint64_t boxes[kLanes];  // for collectives
  uint64_t seen_step;                             // whose end wait_for_step() saw last
  uint32_t num_copies;                            // launched by this kernel
  // wait_for_step(): the end was seen, or a pass is wanted; writer: the thread that polls.
  uint32_t is_over;
  uint32_t wants_pass;  // writer, but for the reset: the polling warp
};
__shared__ SharedState shared;
static_assert(sizeof(SharedState) <= 48 << 10, "static shared memory ends there");

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

__device__ inline bool has_shared_queue_pairs(const Geometry& g) { return g.num_queue_pairs <= kSharedQueuePairs; }
__device__ inline bool has_shared_rows(const Geometry& g) { return g.max_num_seqs <= kSharedRows; }

// Bring program and state to shared memory, and of the state's arrays what a pass looks at first.
__device__ void take_over(const DeviceProgram* program) {
  copy(&shared.program, program, 1);
  copy(&shared.state, shared.program.state, 1);
  const Geometry& g = shared.state.geometry;
  copy(shared.graphs, shared.program.graphs, g.num_graphs);
  if (has_shared_queue_pairs(g)) copy(shared.qps, shared.state.qps, g.num_queue_pairs);
  if (has_shared_rows(g)) copy(shared.next_rows, shared.state.next_rows, g.max_num_seqs);
  if (threadIdx.x == 0) {
    if (has_shared_queue_pairs(g)) shared.state.qps = shared.qps;
    if (has_shared_rows(g)) shared.state.next_rows = shared.next_rows;
    shared.seen_step = shared.num_copies = 0;
  }
  __syncthreads();
}

// Write everything back, for the next kernel.
__device__ void hand_over(DeviceProgram* program) {
  State& home = *shared.program.state;
  const Geometry& g = shared.state.geometry;
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.state.qps = home.qps;
    shared.state.next_rows = home.next_rows;
  }
  __syncthreads();
  if (has_shared_queue_pairs(g)) copy(shared.state.qps, shared.qps, g.num_queue_pairs);
  if (has_shared_rows(g)) copy(shared.state.next_rows, shared.next_rows, g.max_num_seqs);
  copy(&home, &shared.state, 1);
  copy(program, &shared.program, 1);
}

}  // namespace blink
