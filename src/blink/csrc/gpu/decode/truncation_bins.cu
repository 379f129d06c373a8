// SPDX-License-Identifier: Apache-2.0
// The threshold of min-p, top-k and top-p by histograms: one cluster searches one row, which it keeps in shared memory
// as distances from its largest logit. Top-k and top-p ask for the least distance within which k logits lie, or a mass
// of p. Each pass sorts those that share the distance's first bits into bins by the next ten; block 0 finds the bin in
// which the target is reached. Whole numbers are added up, and floats in a fixed order: equal rows end equally.
#include "truncation.cuh"

namespace blink {

constexpr int kBinBits = 10, kBins = 1 << kBinBits, kBinsOfThread = kBins / kTruncationThreads;
constexpr int kBinPasses = 3;                 // the last two bits of a distance tell nothing apart
constexpr float kFarthest = 4.2e9f;           // distance of the least logit
constexpr float kMassUnit = 8192;             // of a logit at its bin's beginning; 2^19 fit in a bin
constexpr float kNear = 12;                   // farther logits seldom matter: they have bins if need be
constexpr uint32_t kNoDistance = 0xffffffff;  // of what may not be sampled

struct Choice {  // of block 0
  uint32_t prefix;
  uint32_t count;  // logits with that prefix; 0: the target lies beyond what has bins
};

struct alignas(16) BinsShared {  // before the block's part of the row
  uint32_t counts[kBins], masses[kBins];
  float of_warps[2][kTruncationWarps];
  float above[kTruncationCluster], total[kTruncationCluster];  // block 0's, from each block
  uint32_t least;                                              // block 0's, key of the threshold
  int reached, filled;                                         // block 0's, bins: the first, the last
  Choice choice;

  __device__ uint32_t* distances() { return reinterpret_cast<uint32_t*>(this + 1); }
};

// What is looked for.
struct Target {
  float value;  // a number, or a share of the mass
  bool is_mass;
};

class BinSearch {
 public:
  __device__ BinSearch(BinsShared& shared, float lowest, float largest)
      : shared_(shared), lowest_(lowest), largest_(largest), range_(largest - lowest) {}

  // Make distances of the block's part of a row.
  __device__ void measure(const Quad* from, int quads) {
    const float scale = range_ > 1e-30f ? kFarthest / range_ : 0;
    count_ = quads * 4;
    for (int i = threadIdx.x; i < quads; i += kTruncationThreads) {
      const Quad quad = from[i];
      uint32_t found[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float value = quad.values[j];
        found[j] = value >= lowest_ ? __float2uint_rz((largest_ - value) * scale) : kNoDistance;
      }
      reinterpret_cast<uint4*>(shared_.distances())[i] = {found[0], found[1], found[2], found[3]};
    }
    rate_ = -1.44269504f * range_ / kFarthest;
    __syncthreads();
  }

  // Narrow what may be sampled to the target. Every block finds the same.
  __device__ void find(Target target) {
    prefix_ = 0, shift_ = 32;
    int last = target.is_mass && range_ > kNear ? min(int(kNear / range_ * kBins) + 1, kBins - 1) : kBins - 1;
    for (int pass = 0; pass < kBinPasses;) {
      const Choice choice = run_pass(target, pass == 0, last);
      if (choice.count > 0) prefix_ = choice.prefix, shift_ -= kBinBits, pass++;
      if (choice.count == 1) break;
      last = kBins - 1;
    }
    farthest_ = min(farthest_, uint32_t((uint64_t(prefix_ + 1) << shift_) - 1));
  }

  // The least logit of those with the prefix found last; block 0 alone is told. from: what measure() read.
  __device__ float find_least(const float* from) {
    if (threadIdx.x == 0) shared_.least = ~0u;
    meet();
    const unsigned least = address_in(0, &shared_.least);
    for (int i = threadIdx.x; i < count_; i += kTruncationThreads) {
      const uint32_t distance = shared_.distances()[i];
      if (distance <= farthest_ && distance >> shift_ == prefix_) lower_in_cluster(least, to_key(from[i]));
    }
    meet();
    return from_key(shared_.least);
  }

 private:
  __device__ static void meet() {
    cluster_arrive();
    cluster_wait();
  }

  __device__ float weigh(uint32_t distance) const { return exp2f(float(distance) * rate_); }

  __device__ Choice run_pass(const Target& target, bool is_first, int last) {
    for (int bin = threadIdx.x; bin < kBins; bin += kTruncationThreads) shared_.counts[bin] = shared_.masses[bin] = 0;
    __syncthreads();
    cluster_arrive();  // all blocks have empty bins once all have waited
    float above = 0, total = 0;
    sort_into_bins(target, is_first, last, above, total);
    add_up(above, total);
    cluster_wait();
    hand_over(above, total);
    meet();
    if (cluster_rank() == 0) choose(target, is_first, last);
    meet();
    return shared_.choice;
  }

  // above: weighs what is nearer than the prefix; total: in the first pass all that may be sampled.
  __device__ void sort_into_bins(const Target& target, bool is_first, int last, float& above, float& total) {
    const int shift = shift_ - kBinBits;
    for (int i = threadIdx.x; i < count_ / 4; i += kTruncationThreads) {
      const uint4 four = reinterpret_cast<const uint4*>(shared_.distances())[i];
      const uint32_t distances[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (const uint32_t distance : distances) {
        if (distance > farthest_) continue;
        const uint32_t prefix = is_first ? 0 : distance >> shift_;
        if (prefix > prefix_) continue;
        const float weight = target.is_mass ? weigh(distance) : 1;
        total += weight;
        if (prefix < prefix_) {
          above += weight;
          continue;
        }
        const int bin = int(distance >> shift & (kBins - 1));
        if (bin > last) continue;
        atomicAdd(&shared_.counts[bin], 1u);
        const uint32_t begin = distance >> shift << shift;
        if (target.is_mass) atomicAdd(&shared_.masses[bin], __float2uint_rn(weigh(distance - begin) * kMassUnit));
      }
    }
  }

  // Add up over the block's threads; its first thread gets the sums.
  __device__ void add_up(float& above, float& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      above += __shfl_xor_sync(~0u, above, step);
      total += __shfl_xor_sync(~0u, total, step);
    }
    if (lane == 0) shared_.of_warps[0][warp] = above, shared_.of_warps[1][warp] = total;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int other = 1; other < kTruncationWarps; other++)
      above += shared_.of_warps[0][other], total += shared_.of_warps[1][other];
  }

  // Give block 0 what this block has found.
  __device__ void hand_over(float above, float total) {
    const unsigned rank = cluster_rank();
    if (threadIdx.x == 0) {
      store_in_cluster(address_in(0, &shared_.above[rank]), above);
      store_in_cluster(address_in(0, &shared_.total[rank]), total);
    }
    if (rank == 0) return;
    const unsigned counts = address_in(0, shared_.counts), masses = address_in(0, shared_.masses);
    for (int bin = threadIdx.x; bin < kBins; bin += kTruncationThreads) {
      if (shared_.counts[bin] == 0) continue;
      add_in_cluster(counts + bin * 4, shared_.counts[bin]);
      if (shared_.masses[bin]) add_in_cluster(masses + bin * 4, shared_.masses[bin]);
    }
  }

  // Tell all blocks the prefix with which the target is reached. Runs on: block 0.
  __device__ void choose(const Target& target, bool is_first, int last) {
    float above = 0, total = 0;
    for (int block = 0; block < kTruncationCluster; block++)
      above += shared_.above[block], total += shared_.total[block];
    if (is_first) wanted_ = target.is_mass ? target.value * total : target.value;
    if (threadIdx.x == 0) shared_.reached = kBins, shared_.filled = 0;
    float weights[kBinsOfThread], own = 0;
    const int first = threadIdx.x * kBinsOfThread;
#pragma unroll
    for (int i = 0; i < kBinsOfThread; i++) own += weights[i] = weigh_bin(first + i, target.is_mass);
    float sum = above + add_up_before(own);  // synchronises
#pragma unroll
    for (int i = 0; i < kBinsOfThread; i++) {
      sum += weights[i];
      if (shared_.counts[first + i] == 0) continue;
      atomicMax(&shared_.filled, first + i);
      if (sum >= wanted_) atomicMin(&shared_.reached, first + i);
    }
    __syncthreads();
    if (threadIdx.x >= kTruncationCluster) return;
    // By rounding, or because there are not so many logits, the target may be beyond the last.
    const bool is_beyond = shared_.reached == kBins && last < kBins - 1;
    const uint32_t bin = shared_.reached < kBins ? shared_.reached : shared_.filled;
    store_in_cluster(address_in(threadIdx.x, &shared_.choice.prefix), prefix_ << kBinBits | bin);
    store_in_cluster(address_in(threadIdx.x, &shared_.choice.count), is_beyond ? 0 : shared_.counts[bin]);
  }

  __device__ float weigh_bin(int bin, bool is_mass) const {
    if (!is_mass) return float(shared_.counts[bin]);
    const uint32_t begin = (prefix_ << kBinBits | uint32_t(bin)) << (shift_ - kBinBits);
    return float(shared_.masses[bin]) / kMassUnit * weigh(begin);
  }

  // Add up the numbers of the block's threads before this one.
  __device__ float add_up_before(float own) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) shared_.of_warps[0][warp] = sum;
    const float before = __shfl_up_sync(~0u, sum, 1);
    __syncthreads();
    float base = 0;
    for (int other = 0; other < warp; other++) base += shared_.of_warps[0][other];
    return lane > 0 ? base + before : base;
  }

  BinsShared& shared_;
  const float lowest_, largest_, range_;
  float rate_ = 0;    // of a distance, for powers of 2
  float wanted_ = 0;  // block 0's
  int count_ = 0;     // logits of the block
  uint32_t prefix_ = 0, farthest_ = kNoDistance - 1;
  int shift_ = 32;  // bits of a distance behind the prefix
};

// Find the thresholds of the truncated rows. grid: (kTruncationCluster, rows), clusters of one row.
__global__ void __launch_bounds__(kTruncationThreads, 3) find_thresholds_by_bins(const TruncationArgs args) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<BinsShared*>(memory);
  launch_dependents();
  wait_for_prerequisites();
  const long row = blockIdx.y;
  if (row >= args.header->num_rows) return;
  const Sampling& p = args.params[args.row_slots[row]].sampling;
  if (!is_truncated(p)) return;
  const Extremes extremes = find_extremes(args, row);
  float threshold = extremes.lowest;
  if (p.min_p > 0) threshold = fmaxf(threshold, extremes.largest + __logf(p.min_p));
  if (extremes.can_sample && (p.top_k > 0 || p.top_p < 1)) {
    const Part part = find_part(args);
    const Quad* from = reinterpret_cast<const Quad*>(args.logits + row * args.width) + part.first;
    BinSearch search(shared, threshold, extremes.largest);
    search.measure(from, part.count);
    if (p.top_k > 0) search.find({float(p.top_k), false});
    if (p.top_p < 1) search.find({p.top_p, true});
    threshold = search.find_least(reinterpret_cast<const float*>(from));
  }
  if (cluster_rank() == 0 && threadIdx.x == 0) store_threshold(args, row, extremes.can_sample, threshold);
}

}  // namespace blink
