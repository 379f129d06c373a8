// SPDX-License-Identifier: Apache-2.0
// The scheduler as a resident kernel: one block of 256 threads. It launches the step graphs from the device. CUDA
// limits the launches of one kernel, so it launches itself anew after each window. Between windows all state is in
// global memory.
#include "device/follower.cuh"
#include "device/wait.cuh"

namespace blink {

constexpr uint32_t kIdlePasses = 1000;  // passes without work before the block dozes between them

// Run passes until the window's launches are spent; false if the scheduler has ended.
__device__ bool run_window() {
  DeviceEnv env;
  State& state = shared.state;
  uint32_t launches = 0, idle = 0;
  while (launches + shared.num_copies < kLaunchesPerWindow) {
    const StepResult result = step(env, state);
    if (result == StepResult::kStopped || result == StepResult::kFailed) return false;
    launches += result == StepResult::kLaunched;
    idle = result == StepResult::kIdle ? idle + 1 : 0;
    if (result == StepResult::kHeld || idle > kIdlePasses)
      doze(state);
    else if (result == StepResult::kBusy)
      wait_for_step(state);
  }
  return true;
}

}  // namespace blink

// Run the scheduler until the host's stop word or an error ends it. Launched once by the host, then by itself.
extern "C" __global__ void __launch_bounds__(blink::kLanes, 1) blink_scheduler(blink::DeviceProgram* program) {
  using namespace blink;
  take_over(program);
  const bool continues = run_window();
  if (threadIdx.x == 0) shared.program.windows += continues;
  if (threadIdx.x == 0 && !continues) DeviceEnv::tell_followers({uint32_t(shared.state.step) + 1, kEndOfPlans, kNone});
  hand_over(program);
  if (!continues || threadIdx.x != 0) return;
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
