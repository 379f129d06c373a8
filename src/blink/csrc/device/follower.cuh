// SPDX-License-Identifier: Apache-2.0
// A rank on another GPU than the scheduler's: one thread that polls its plan word and launches the same graph of its
// own. It decides nothing. As the scheduler it launches itself anew after each window.
#pragma once

#include "device/device_env.cuh"

namespace blink {

constexpr uint32_t kPlanSleepNs = 50;          // between two looks at the plan word
constexpr uint64_t kMostStepNs = 30000000000;  // of which a step's kernels wait for others a few seconds at the most

// Wait for the plan after a step. There is no bound: none comes while there is no work.
__device__ inline Plan await_plan(const FollowerProgram& program) {
  Plan plan = unpack_plan(load_acquire(*program.plan_word));
  while (plan.step == program.step) {
    __nanosleep(kPlanSleepNs);
    plan = unpack_plan(load_acquire(*program.plan_word));
  }
  return plan;
}

// Launch what a plan says and wait for its end.
__device__ inline bool follow(FollowerProgram& program, Plan plan) {
  const bool is_whole = plan.segment == kNone;
  const StepGraphs& graphs = program.graphs[plan.graph];
  CUgraphExec_st* executable = is_whole ? graphs.whole[program.parity] : graphs.segments[plan.segment];
  program.parity ^= is_whole;
  program.step = plan.step;
  program.failed = cudaGraphLaunch(executable, cudaStreamGraphFireAndForget);
  if (program.failed != cudaSuccess) return false;
  const StepOutput& output = *program.outputs[uint32_t(is_whole ? StepKind::kWhole : StepKind::kSegmented)];
  const uint64_t begin = DeviceEnv::now();
  bool is_late = false;
  while (uint32_t(load_acquire(output.done_step)) != plan.step && !is_late)
    is_late = DeviceEnv::now() - begin > kMostStepNs;
  if (is_late) program.failed = cudaErrorLaunchTimeout;
  return !is_late;
}

// Follow plans until the window's launches are spent; false if no more come.
__device__ inline bool follow_window(FollowerProgram& program) {
  for (uint32_t launches = 0; launches < kLaunchesPerWindow; launches++) {
    const Plan plan = await_plan(program);
    if (plan.graph == kEndOfPlans || !follow(program, plan)) return false;
  }
  return true;
}

}  // namespace blink

// Follow the first rank's scheduler until it ends. Launched once by the host, then by itself.
extern "C" __global__ void blink_follower(blink::FollowerProgram* home) {
  using namespace blink;
  FollowerProgram program = *home;
  const bool continues = follow_window(program);
  *home = program;
  if (!continues) return;
  __threadfence();
  const cudaError_t status = cudaGraphLaunch(cudaGetCurrentGraphExec(), cudaStreamGraphTailLaunch);
  if (status != cudaSuccess) home->failed = status;
}
