// SPDX-License-Identifier: Apache-2.0
// The scheduler as a resident kernel: one block of 256 threads. It launches the step graphs from the device and, before
// a window of launches (CUDA's limit) is over, launches itself anew; between windows all state is in global memory.
#include <cuda_device_runtime_api.h>

#include "gpu/program.h"
#include "scheduler/scheduler.h"

namespace blink {

constexpr uint32_t kLanes = kDeviceLanes;
constexpr uint32_t kWarpLanes = 32;
constexpr uint32_t kWarps = kLanes / kWarpLanes;
constexpr uint32_t kIdlePasses = 1000;     // passes without work before the block dozes between them
constexpr uint64_t kIdlePassNs = 5000000;  // the longest time between two passes: heartbeat, leases, the engine's words
constexpr uint64_t kBusyPassNs = 1000000;  // the same while a step runs
constexpr uint64_t kLookNs = 5000;         // between looks at the frontends' words while a step runs
constexpr uint64_t kKeepNs = 10000;        // between touches of what the end of a step is expected to read
constexpr uint32_t kNearQueuePairs = 32;   // how many of them, and of rows, have a place in shared memory
constexpr uint32_t kNearRows = 256;

// What the block works with, in shared memory: between two steps the model's weights drive it out of every cache. It is
// the only copy that is kept up to date; program and state take it back before the kernel ends.
struct Near {
  DeviceProgram program;
  State state;
  StepGraphs graphs[kMaxGraphs];
  QueuePairState qps[kNearQueuePairs];
  NextRow next_rows[kNearRows];
  uint64_t boxes[kLanes];  // for collectives
  uint64_t seen_step;      // whose end watch_step() saw last
  uint32_t is_over;        // watch_step(): the end was seen, or a pass is wanted; writer: the thread that watches
  uint32_t wants_pass;     // writer, but for the reset: the warp that looks
};
__shared__ Near near;
static_assert(sizeof(Near) <= 48 << 10, "static shared memory ends there");

struct DeviceEnv {
  __device__ static uint32_t lane() { return threadIdx.x; }
  __device__ static uint32_t lanes() { return kLanes; }
  __device__ static void sync() { __syncthreads(); }
  __device__ static uint32_t fetch_add(uint32_t& word, uint32_t n) { return atomicAdd(&word, n); }
  __device__ static uint64_t now() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
  }

  template <class T>
  __device__ static T share(T value) {
    auto* box = reinterpret_cast<T*>(near.boxes);
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
    auto* box = reinterpret_cast<T*>(near.boxes);
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

  // No kernel of a step reports failure: one that breaks takes the context with it.
  __device__ static Outcome outcome(const StepOutput& output, uint64_t step) {
    const bool is_over = near.seen_step == step || load_acquire(output.done_step) == step;
    return is_over ? Outcome::kDone : Outcome::kRuns;
  }

  // Launch a step whole (segment kNone), or one of its segments.
  __device__ static bool launch(uint32_t graph, uint32_t segment) {
    // The batch, written by all lanes before the last sync, must be there when the graph starts.
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    const StepGraphs& graphs = near.graphs[graph];
    const uint32_t parity = near.program.parity;
    if (segment == kNone) near.program.parity = parity ^ 1;
    CUgraphExec_st* executable = segment == kNone ? graphs.whole[parity] : graphs.segments[segment];
    return cudaGraphLaunch(executable, cudaStreamGraphFireAndForget) == cudaSuccess;
  }

 private:
  // Sum of the lanes before (x) and of all (y).
  __device__ __noinline__ static uint2 scan_words(uint32_t value) {
    uint32_t inclusive = value;
    for (uint32_t step = 1; step < kWarpLanes; step *= 2) {
      const uint32_t left = __shfl_up_sync(0xffffffffu, inclusive, step);
      if (threadIdx.x % kWarpLanes >= step) inclusive += left;
    }
    auto* box = reinterpret_cast<uint32_t*>(near.boxes);
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
  }
}

// Wait for the end of the launch in flight, for a frontend's news, or until a pass is due. One thread watches the end;
// another warp looks at the frontends' words now and then, each look a round trip to the host that the thread must not
// make. Where the next step will have to be composed the others keep what that takes out of the model's way; else they
// wait at the barrier, which costs no issue slots.
__device__ void watch_step(const State& s) {
  volatile uint32_t &is_over = near.is_over, &wants_pass = near.wants_pass;
  if (threadIdx.x == 0) is_over = wants_pass = 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint64_t& done = output_in_flight(s).done_step;
    bool is_seen = false;
    while (!is_seen && !wants_pass) is_seen = load_acquire(done) == s.step;
    if (is_seen) near.seen_step = s.step;
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
  } else if (!s.may_repeat || s.num_waiting > 0) {
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

// Wait until a frontend has news or a pass is due. One warp looks; the others wait at the barrier, which costs no issue
// slots.
__device__ inline void doze(const State& s) {
  if (threadIdx.x < kWarpLanes) {
    const uint64_t due = DeviceEnv::now() + kIdlePassNs;
    bool wakes = false;
    while (__any_sync(0xffffffffu, wakes) == 0) {
      __nanosleep(near.program.idle_sleep_ns);
      wakes = DeviceEnv::now() >= due;
      for (uint32_t qp = threadIdx.x; qp < s.geometry.num_queue_pairs; qp += kWarpLanes) wakes |= has_news(s, qp);
    }
  }
  __syncthreads();
}

// Run passes until the window's launches are spent; false if the scheduler has ended.
__device__ bool run_window() {
  DeviceEnv env;
  State& state = near.state;
  uint32_t launches = 0, idle = 0;
  while (launches < kLaunchesPerWindow) {
    const StepResult result = step(env, state);
    if (result == StepResult::kStopped || result == StepResult::kFailed) return false;
    launches += result == StepResult::kLaunched;
    idle = result == StepResult::kIdle ? idle + 1 : 0;
    if (idle > kIdlePasses)
      doze(state);
    else if (result == StepResult::kBusy)
      watch_step(state);
  }
  return true;
}

}  // namespace blink

// Run the scheduler until the host's stop word or an error ends it. Launched once by the host, then by itself.
extern "C" __global__ void __launch_bounds__(blink::kLanes, 1) blink_scheduler(blink::DeviceProgram* program) {
  using namespace blink;
  take_over(program);
  const bool goes_on = run_window();
  if (threadIdx.x == 0) near.program.windows += goes_on;
  hand_over(program);
  if (!goes_on || threadIdx.x != 0) return;
  if (cudaGraphLaunch(cudaGetCurrentGraphExec(), cudaStreamGraphTailLaunch) != cudaSuccess)
    fail(*program->state, ErrorCode::kLaunchFailed, BLINK_HERE, kLaunchesPerWindow);
}

// Run at most `passes` passes and return, for tests.
extern "C" __global__ void __launch_bounds__(blink::kLanes, 1)
    blink_scheduler_passes(blink::DeviceProgram* program, uint32_t passes) {
  using namespace blink;
  take_over(program);
  DeviceEnv env;
  for (uint32_t i = 0; i < passes; i++) step(env, near.state);
  hand_over(program);
}

// The last node of every step graph: everything before it is done. What the kernels before have written is there as
// this one starts, and goes with its release, whose scope is the GPU's, where alone it is read.
extern "C" __global__ void blink_mark_done(blink::BatchHeader* batch, blink::StepOutput* output) {
  asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(&output->done_step), "l"(batch->step) : "memory");
}
