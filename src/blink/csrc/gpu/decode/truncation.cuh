// SPDX-License-Identifier: Apache-2.0
// The threshold of min-p, top-k and top-p: one cluster searches one row, which it keeps in shared memory, without
// sorting it. Top-k and top-p ask for the largest t such that the logits >= t reach a target: k of them, or a mass of
// p. Each pass measures 16 equal parts of the interval of bit patterns that t is in, so eight passes end exactly. Sums
// are taken in a fixed order.
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

constexpr int kTruncationThreads = 1024, kTruncationCluster = 8;
constexpr int kTruncationWarps = kTruncationThreads / 32;
constexpr int kCutBits = 4, kCuts = 1 << kCutBits;
constexpr float kGreedyTemperature = 1e-5f;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);

struct alignas(16) TruncationShared {  // before the block's part of the row
  float of_warps[kTruncationWarps][kCuts];
  float of_blocks[2][kTruncationCluster][kCuts];  // alternately, so that a pass does not overwrite what another reads
  float weights[kCuts];

  __device__ float* values() { return reinterpret_cast<float*>(this + 1); }
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

// The interval of keys that the threshold is in, and what lies at or above its end.
struct Interval {
  uint32_t low, high;
  float above;
};

class TruncationSearch {
 public:
  __device__ TruncationSearch(TruncationShared& shared, int count, float largest)
      : shared_(shared), count_(count), largest_(largest) {}

  // The largest t >= low whose logits reach the target: a number, or a share of the mass of all logits >= low.
  __device__ float find(float low, float target, bool is_mass) {
    Interval at{to_key(low), to_key(largest_) + 1, 0};
    for (bool first = true; at.high - at.low > 1; first = false) {
      const int bits = 32 - __clz(at.high - at.low - 1);
      const int shift = bits > kCutBits ? bits - kCutBits : 0;
      measure(at, shift, is_mass);
      if (is_mass && first) target *= shared_.weights[0];
      int cut = kCuts - 1;  // the last that reaches; the first does, or `low` would not be in the interval
      while (cut > 0 && at.above + shared_.weights[cut] < target) cut--;
      const float beyond = cut + 1 < kCuts ? shared_.weights[cut + 1] : 0;
      const uint32_t end = at.low + (uint32_t(cut + 1) << shift);
      at = {at.low + (uint32_t(cut) << shift), end < at.high && end > at.low ? end : at.high, at.above + beyond};
    }
    return from_key(at.low);
  }

 private:
  // Leave in `weights` what the interval's logits at or above each cut weigh.
  __device__ void measure(Interval at, int shift, bool is_mass) {
    float sums[kCuts] = {};
    for (int i = threadIdx.x; i < align(count_); i += kTruncationThreads) {
      const float value = i < count_ ? shared_.values()[i] : -kInfinity;
      const uint32_t key = to_key(value);
      const bool inside = key >= at.low && key < at.high;
      if (!__any_sync(~0u, inside)) continue;
      const uint32_t place = (key - at.low) >> shift;
      const float weight = !inside ? 0 : is_mass ? __expf(value - largest_) : 1;
#pragma unroll
      for (int cut = 0; cut < kCuts; cut++) sums[cut] += place >= uint32_t(cut) ? weight : 0;
    }
    add_up(sums);
  }

  // Add up over the cluster's threads.
  __device__ void add_up(float (&sums)[kCuts]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int cut = 0; cut < kCuts; cut++) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sums[cut] += __shfl_xor_sync(~0u, sums[cut], step);
      if (lane == cut) shared_.of_warps[warp][cut] = sums[cut];
    }
    __syncthreads();
    if (threadIdx.x < kCuts) {
      float sum = 0;
      for (int other = 0; other < kTruncationWarps; other++) sum += shared_.of_warps[other][threadIdx.x];
      for (int block = 0; block < kTruncationCluster; block++)
        store_in_cluster(address_in(block, &shared_.of_blocks[parity_][cluster_rank()][threadIdx.x]), sum);
    }
    cluster_arrive();
    cluster_wait();
    if (threadIdx.x < kCuts) {
      float sum = 0;
      for (int block = 0; block < kTruncationCluster; block++) sum += shared_.of_blocks[parity_][block][threadIdx.x];
      shared_.weights[threadIdx.x] = sum;
    }
    __syncthreads();
    parity_ ^= 1;
  }

  static __device__ int align(int count) { return (count + 31) / 32 * 32; }

  TruncationShared& shared_;
  const int count_;
  const float largest_;
  int parity_ = 0;
};

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

// Copy the block's part of a row to shared memory; returns its length.
__device__ inline int load_part(const TruncationArgs& args, long row, TruncationShared& shared) {
  const uint32_t quads = args.width / 4, share = (quads + kTruncationCluster - 1) / kTruncationCluster;
  const uint32_t first = min(cluster_rank() * share, quads), count = min(share, quads - first);
  const auto* from = reinterpret_cast<const float4*>(args.logits + row * args.width) + first;
  for (uint32_t i = threadIdx.x; i < count; i += kTruncationThreads)
    reinterpret_cast<float4*>(shared.values())[i] = from[i];
  __syncthreads();
  return int(count * 4);
}

// Find the thresholds of the truncated rows. grid: (kTruncationCluster, rows), clusters of one row.
__global__ void __launch_bounds__(kTruncationThreads) find_thresholds(const TruncationArgs args) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<TruncationShared*>(memory);
  launch_dependents();
  wait_for_prerequisites();
  const long row = blockIdx.y;
  if (row >= args.header->num_rows) return;
  const Sampling& p = args.params[args.row_slots[row]].sampling;
  if (!is_truncated(p)) return;
  const Extremes extremes = find_extremes(args, row);
  float threshold = extremes.lowest;
  if (extremes.can_sample) {
    TruncationSearch search(shared, load_part(args, row, shared), extremes.largest);
    cluster_arrive();  // all blocks have started once all have waited
    cluster_wait();
    if (p.min_p > 0) threshold = fmaxf(threshold, extremes.largest + __logf(p.min_p));
    if (p.top_k > 0) threshold = search.find(threshold, float(p.top_k), false);
    if (p.top_p < 1) threshold = search.find(threshold, p.top_p, true);
  }
  if (cluster_rank() == 0 && threadIdx.x == 0) {
    args.thresholds[row] = extremes.can_sample ? threshold : __uint_as_float(0x7fc00000u);
    args.arrivals[row] = 0;
  }
}

}  // namespace blink
