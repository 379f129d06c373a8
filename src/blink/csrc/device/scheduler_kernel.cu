// SPDX-License-Identifier: Apache-2.0
// The scheduler as a resident kernel: one block of 256 threads. It launches the step graphs from the device. CUDA
// limits the launches of one kernel, so it launches itself anew after each window. Between windows all state is in
// global memory.
#include "device/follower.cuh"
#include "device/wait.cuh"

namespace blink {

constexpr uint32_t kIdlePasses = 1000;  // passes without work before the block dozes between them

// How a window ends: its launches are spent; the host is to have the device; or the scheduler has ended.
enum class WindowEnd : uint32_t { kSpent, kAway, kEnded };

// Run passes until the window ends.
__device__ WindowEnd run_window() {
  DeviceEnv env;
  State& state = shared.state;
  uint32_t launches = 0, idle = 0;
  while (launches + shared.num_copies < kLaunchesPerWindow) {
    const StepResult result = step(env, state);
    if (result == StepResult::kStopped || result == StepResult::kFailed) return WindowEnd::kEnded;
    if (result == StepResult::kAway) return WindowEnd::kAway;
    launches += result == StepResult::kLaunched;
    idle = result == StepResult::kIdle ? idle + 1 : 0;
    if (result == StepResult::kHeld || idle > kIdlePasses)
      doze(state);
    else if (result == StepResult::kBusy)
      wait_for_step(state);
  }
  return WindowEnd::kSpent;
}

}  // namespace blink

// Run the scheduler until the host's stop word or an error ends it, or the host is to have the device. Launched by the
// host, once and when it has had the device, and else by itself.
extern "C" __global__ void __launch_bounds__(blink::kLanes, 1) blink_scheduler(blink::DeviceProgram* program) {
  using namespace blink;
  take_over(program);
  const WindowEnd end = run_window();
  if (threadIdx.x == 0) shared.program.windows += end == WindowEnd::kSpent;
  if (threadIdx.x == 0 && end == WindowEnd::kEnded)
    DeviceEnv::tell_followers({uint32_t(shared.state.step) + 1, kEndOfPlans, kNone});
  hand_over(program);
  if (end != WindowEnd::kSpent || threadIdx.x != 0) return;
  if (cudaGraphLaunch(cudaGetCurrentGraphExec(), cudaStreamGraphTailLaunch) != cudaSuccess)
    fail(*program->state, ErrorCode::kLaunchFailed, BLINK_HERE, kLaunchesPerWindow);
}

// Run at most `passes` passes and return, for tests.
extern "C" __global__ void __launch_bounds__(blink::kLanes, 1)
    blink_scheduler_passes(blink::DeviceProgram* program, uint32_t passes) {
  using namespace blink;
  take_over(program);
  DeviceEnv env;
  for (uint32_t i = 0; i < passes; i++) step(env, shared.state);
  hand_over(program);
}

// The last node of every step graph: everything before it is done. What the kernels before have written is there as
// this one starts, and goes with its release, whose scope is the GPU's, where alone it is read.
extern "C" __global__ void blink_mark_done(blink::BatchHeader* batch, blink::StepOutput* output) {
  asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(&output->done_step), "l"(batch->step) : "memory");
}
