// SPDX-License-Identifier: Apache-2.0
// The scheduler as a resident kernel: one block of 256 threads. It launches the step graphs from the device and, before
// a window of launches (CUDA's limit) is over, launches itself anew; all state is in global memory.
#include <cuda_device_runtime_api.h>

#include "gpu/program.h"
#include "scheduler/scheduler.h"

namespace blink {

constexpr uint32_t kLanes = kDeviceLanes;
constexpr uint32_t kWarps = kLanes / 32;
constexpr uint32_t kIdlePasses = 1000;     // passes without work before the block dozes between them
constexpr uint64_t kIdlePassNs = 5000000;  // the longest time between two passes: heartbeat, leases, the engine's words
constexpr uint64_t kWatchNs = 3000;        // between looks at the queues while a step runs, whose end is seen at once

struct DeviceEnv {
  DeviceProgram* program;
  uint64_t* shared;  // kLanes words for collectives

  __device__ uint32_t lane() const { return threadIdx.x; }
  __device__ uint32_t lanes() const { return kLanes; }
  __device__ void sync() const { __syncthreads(); }
  __device__ uint32_t fetch_add(uint32_t& word, uint32_t n) const { return atomicAdd(&word, n); }
  __device__ uint64_t now() const {
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
  }

  template <class T>
  __device__ T share(T value) const {
    auto* box = reinterpret_cast<T*>(shared);
    if (threadIdx.x == 0) *box = value;
    __syncthreads();
    value = *box;
    __syncthreads();
    return value;
  }

  // Combine over all lanes: within each warp by shuffles, then over the warps through shared memory.
  template <class T, class Combine>
  __device__ T reduce(T value, Combine combine) const {
    for (uint32_t step = 16; step > 0; step /= 2) value = combine(value, shuffle_xor(value, step));
    auto* box = reinterpret_cast<T*>(shared);
    if (threadIdx.x % 32 == 0) box[threadIdx.x / 32] = value;
    __syncthreads();
    value = box[0];
    for (uint32_t warp = 1; warp < kWarps; warp++) value = combine(value, box[warp]);
    __syncthreads();
    return value;
  }
  template <class T>
  __device__ T sum(T value) const {
    return reduce(value, [](T a, T b) { return a + b; });
  }
  template <class T>
  __device__ T least(T value) const {
    return reduce(value, [](T a, T b) { return b < a ? b : a; });
  }
  template <class T>
  __device__ T most(T value) const {
    return reduce(value, [](T a, T b) { return a < b ? b : a; });
  }

  __device__ uint32_t scan(uint32_t value, uint32_t& total) const {
    uint32_t inclusive = value;
    for (uint32_t step = 1; step < 32; step *= 2) {
      const uint32_t left = __shfl_up_sync(0xffffffffu, inclusive, step);
      if (threadIdx.x % 32 >= step) inclusive += left;
    }
    auto* box = reinterpret_cast<uint32_t*>(shared);
    if (threadIdx.x % 32 == 31) box[threadIdx.x / 32] = inclusive;
    __syncthreads();
    uint32_t before = 0;
    total = 0;
    for (uint32_t warp = 0; warp < kWarps; warp++) {
      if (warp < threadIdx.x / 32) before += box[warp];
      total += box[warp];
    }
    __syncthreads();
    return before + inclusive - value;
  }

  // Launch a step whole (segment kNone), or one of its segments.
  __device__ bool launch(uint32_t graph, uint32_t segment) const {
    __threadfence();  // the batch, written by all lanes before the last sync, must be there when the graph starts
    const StepGraphs& graphs = program->graphs[graph];
    const uint32_t parity = program->parity;
    if (segment == kNone) program->parity = parity ^ 1;
    CUgraphExec_st* executable = segment == kNone ? graphs.whole[parity] : graphs.segments[segment];
    return cudaGraphLaunch(executable, cudaStreamGraphFireAndForget) == cudaSuccess;
  }

 private:
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

// Wait for the end of the launch in flight, but not for long.
__device__ void watch_step(const DeviceEnv& env, const State& s) {
  if (threadIdx.x == 0) {
    const uint64_t& done = output_in_flight(s).done_step;
    for (const uint64_t begin = env.now(); load_acquire(done) != s.step && env.now() - begin < kWatchNs;)
      __nanosleep(100);
  }
  __syncthreads();
}

// Wait until a frontend has news or a pass is due. One warp looks; the others wait at the barrier, which costs no issue
// slots.
__device__ inline void doze(const DeviceEnv& env, const State& s) {
  constexpr uint32_t kWarpLanes = 32;
  if (env.lane() < kWarpLanes) {
    const uint64_t due = env.now() + kIdlePassNs;
    bool wakes = false;
    while (__any_sync(0xffffffffu, wakes) == 0) {
      __nanosleep(env.program->idle_sleep_ns);
      wakes = env.now() >= due;
      for (uint32_t qp = env.lane(); qp < s.geometry.num_queue_pairs; qp += kWarpLanes) wakes |= has_news(s, qp);
    }
  }
  env.sync();
}

}  // namespace blink

// Run the scheduler until the host's stop word or an error ends it. Launched once by the host, then by itself.
extern "C" __global__ void __launch_bounds__(blink::kLanes, 1) blink_scheduler(blink::DeviceProgram* program) {
  using namespace blink;
  __shared__ uint64_t shared[kLanes];
  DeviceEnv env{program, shared};
  State& state = *program->state;
  uint32_t launches = 0, idle = 0;
  while (launches < kLaunchesPerWindow) {
    const StepResult result = step(env, state);
    if (result == StepResult::kStopped || result == StepResult::kFailed) return;
    launches += result == StepResult::kLaunched;
    idle = result == StepResult::kIdle ? idle + 1 : 0;
    if (idle > kIdlePasses)
      doze(env, state);
    else if (result == StepResult::kBusy)
      watch_step(env, state);
  }
  if (threadIdx.x == 0) {
    program->windows++;
    if (cudaGraphLaunch(cudaGetCurrentGraphExec(), cudaStreamGraphTailLaunch) != cudaSuccess)
      fail(state, ErrorCode::kLaunchFailed, BLINK_HERE, launches);
  }
}

// Run at most `passes` passes and return, for tests.
extern "C" __global__ void __launch_bounds__(blink::kLanes, 1)
    blink_scheduler_passes(blink::DeviceProgram* program, uint32_t passes) {
  using namespace blink;
  __shared__ uint64_t shared[kLanes];
  DeviceEnv env{program, shared};
  for (uint32_t i = 0; i < passes; i++) step(env, *program->state);
}

// The last node of every step graph: everything before it is done.
extern "C" __global__ void blink_mark_done(blink::BatchHeader* batch, blink::StepOutput* output) {
  __threadfence();
  blink::store_release(output->done_step, batch->step);
}
