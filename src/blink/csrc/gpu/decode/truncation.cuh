// SPDX-License-Identifier: Apache-2.0
// What the searches for a row's threshold share: arguments, keys, and a row in the shared memory of a cluster.
#pragma once

#include "ptx.cuh"
#include "scheduler/state.h"

namespace blink {

struct TruncationArgs {
  const float* logits;  // [rows, width], -inf where nothing is; width a multiple of 4
  const float* best;    // [rows, parts], the parts' largest logits, NaN if one is
  const float* lowest;  // [rows, parts], the parts' least finite logits
  const BatchHeader* header;
  const int32_t* row_slots;
  const SlotParams* params;
  float* thresholds;   // [rows], of truncated rows; NaN if nothing can be sampled
  uint32_t* arrivals;  // [rows], set to 0
  uint32_t width, num_parts;
};

constexpr int kTruncationThreads = 256, kTruncationCluster = 8;
constexpr int kTruncationWarps = kTruncationThreads / 32;
constexpr float kGreedyTemperature = 1e-5f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);

struct alignas(16) Quad {
  float values[4];
};

// Keys in the order of float values.
__device__ inline uint32_t to_key(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline float from_key(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

__device__ inline bool is_truncated(const Sampling& p) {
  return p.temperature >= kGreedyTemperature && (p.top_k > 0 || p.top_p < 1 || p.min_p > 0);
}

// The largest logit of a row and its least finite one; every warp finds them for itself.
struct Extremes {
  float lowest, largest;
  bool can_sample;
};
__device__ inline Extremes find_extremes(const TruncationArgs& args, long row) {
  float lowest = kInfinity, largest = -kInfinity;
  bool broken = false;
  for (uint32_t part = threadIdx.x % 32; part < args.num_parts; part += 32) {
    const float best = args.best[row * args.num_parts + part];
    broken |= best != best || best == kInfinity;
    largest = fmaxf(largest, best);
    lowest = fminf(lowest, args.lowest[row * args.num_parts + part]);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    lowest = fminf(lowest, __shfl_xor_sync(~0u, lowest, step));
  }
  return {lowest, largest, !__any_sync(~0u, broken) && largest > -kInfinity};
}

// The block's part of a row, in quads.
struct Part {
  uint32_t first, count;
};
__device__ inline Part find_part(const TruncationArgs& args) {
  const uint32_t quads = args.width / 4, share = (quads + kTruncationCluster - 1) / kTruncationCluster;
  const uint32_t first = min(cluster_rank() * share, quads);
  return {first, min(share, quads - first)};
}

// Leave what was found for the kernels that follow. Runs on: one thread of the cluster.
__device__ inline void store_threshold(const TruncationArgs& args, long row, bool can_sample, float threshold) {
  args.thresholds[row] = can_sample ? threshold : __uint_as_float(0x7fc00000u);
  args.arrivals[row] = 0;
}

}  // namespace blink
