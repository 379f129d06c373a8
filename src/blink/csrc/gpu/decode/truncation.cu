// SPDX-License-Identifier: Apache-2.0
// The threshold of min-p, top-k and top-p: one cluster searches one row, which it keeps in shared memory, without
// sorting it. Top-k and top-p ask for the largest t such that the logits >= t reach a target: k of them, or a mass of
// p. Each pass measures 16 parts of the interval that t is in: first equal ones of values, which few logits share, then
// equal ones of bit patterns, which end exactly. Sums are taken in a fixed order.
#include "truncation.cuh"

namespace blink {

constexpr int kCutBits = 4, kCuts = 1 << kCutBits;
constexpr int kPassesOverValues = 2;

struct alignas(16) TruncationShared {  // before the block's part of the row
  float of_warps[kTruncationWarps][kCuts];
  float of_blocks[2][kTruncationCluster][kCuts];  // alternately, so that a pass does not overwrite what another reads

  __device__ Quad* quads() { return reinterpret_cast<Quad*>(this + 1); }
};

// Where one pass looks, in keys; a part of an interval begins at each cut.
struct Interval {
  uint32_t low, high;

  __device__ uint32_t cut(int index, int pass) const {
    if (index == 0) return low;
    if (index == kCuts) return high;
    const float from = from_key(low), step = (from_key(high) - from) / kCuts;
    const int bits = 32 - __clz(high - low - 1), shift = bits > kCutBits ? bits - kCutBits : 0;
    if (pass < kPassesOverValues) return min(high, max(low, to_key(from + index * step)));
    return uint32_t(min(uint64_t(high), low + (uint64_t(index) << shift)));
  }
};

class TruncationSearch {
 public:
  __device__ TruncationSearch(TruncationShared& shared, int quads, float largest)
      : shared_(shared), quads_(quads), largest_(largest) {}

  // The largest t >= low whose logits reach the target: a number, or a share of the mass of all logits >= low.
  __device__ float find(float low, float target, bool is_mass) {
    Interval at{to_key(low), to_key(largest_) + 1};
    float above = 0;  // what lies at or above the interval's end weighs
    for (int pass = 0; at.high - at.low > 1; pass++) {
      const float weight = measure(at, pass, is_mass);
      if (is_mass && pass == 0) target *= __shfl_sync(~0u, weight, 0);
      // The last cut that reaches. The first does, or `low` would not be in the interval.
      const uint32_t reaching = __ballot_sync(~0u, threadIdx.x % 32 < kCuts && above + weight >= target) | 1;
      const int cut = 31 - __clz(reaching);
      const float beyond = __shfl_sync(~0u, weight, cut + 1);
      at = {at.cut(cut, pass), at.cut(cut + 1, pass)};
      above += cut + 1 < kCuts ? beyond : 0;
    }
    return from_key(at.low);
  }

 private:
  // Return to lane n what the interval's logits at or above cut n weigh.
  __device__ __forceinline__ float measure(Interval at, int pass, bool is_mass) {
    float cuts[kCuts], sums[kCuts] = {};
#pragma unroll
    for (int cut = 0; cut < kCuts; cut++) cuts[cut] = from_key(at.cut(cut, pass));
    const float last = from_key(at.high - 1);
    for (int i = threadIdx.x; i < quads_; i += kTruncationThreads) {
      const Quad quad = shared_.quads()[i];
      bool inside = false;
#pragma unroll
      for (const float value : quad.values) inside |= value >= cuts[0] && value <= last;
      if (!inside) continue;
#pragma unroll
      for (const float value : quad.values) {
        const float weight = value > last ? 0 : is_mass ? __expf(value - largest_) : 1;
#pragma unroll
        for (int cut = 0; cut < kCuts; cut++)
          if (value >= cuts[cut]) sums[cut] += weight;
      }
    }
    return add_up(sums);
  }

  // Add up over the cluster's threads; returns the sum of cut n to lane n.
  __device__ __forceinline__ float add_up(float (&sums)[kCuts]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Half of the lanes go on with half of the cuts, and so on.
#pragma unroll
    for (int half = kCuts / 2; half > 0; half /= 2) {
      const bool upper = lane & 2 * half;
#pragma unroll
      for (int i = 0; i < half; i++) {
        const float other = __shfl_xor_sync(~0u, upper ? sums[i] : sums[i + half], 2 * half);
        sums[i] = (upper ? sums[i + half] : sums[i]) + other;
      }
    }
    sums[0] += __shfl_xor_sync(~0u, sums[0], 1);
    if (lane % 2 == 0) shared_.of_warps[warp][lane / 2] = sums[0];
    __syncthreads();
    if (threadIdx.x < kCuts * kTruncationCluster) {
      const int cut = threadIdx.x % kCuts;
      float sum = 0;
      for (int other = 0; other < kTruncationWarps; other++) sum += shared_.of_warps[other][cut];
      store_in_cluster(address_in(threadIdx.x / kCuts, &shared_.of_blocks[parity_][cluster_rank()][cut]), sum);
    }
    cluster_arrive();
    cluster_wait();
    float sum = 0;
    for (int block = 0; block < kTruncationCluster; block++) sum += shared_.of_blocks[parity_][block][lane % kCuts];
    parity_ ^= 1;
    return sum;
  }

  TruncationShared& shared_;
  const int quads_;
  const float largest_;
  int parity_ = 0;
};

// Copy the block's part of a row to shared memory; returns its length in quads.
__device__ inline int load_part(const TruncationArgs& args, long row, TruncationShared& shared) {
  const Part part = find_part(args);
  const auto* from = reinterpret_cast<const Quad*>(args.logits + row * args.width) + part.first;
  for (uint32_t i = threadIdx.x; i < part.count; i += kTruncationThreads) shared.quads()[i] = from[i];
  __syncthreads();
  return int(part.count);
}

// Find the thresholds of the truncated rows. grid: (kTruncationCluster, rows), clusters of one row.
__global__ void __launch_bounds__(kTruncationThreads, 3) find_thresholds(const TruncationArgs args) {
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
  if (cluster_rank() == 0 && threadIdx.x == 0) store_threshold(args, row, extremes.can_sample, threshold);
}

}  // namespace blink
