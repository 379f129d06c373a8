// SPDX-License-Identifier: Apache-2.0
// The floor of min-p, top-k and top-p: the least logit of a row that may be drawn. Top-k and top-p ask for the least
// distance from the largest logit within which k logits lie, or a mass of p. A pass sorts logits into bins by their
// distance, block 0 finds the bin in which the target is reached, and what lies in that is listed and compared. Where
// the list is too short, the bin is sorted into bins again. Numbers are added up whole, or in a fixed order.
#pragma once

#include "cluster_row.cuh"

namespace blink {

constexpr float kNear = 16;          // natural logarithms below the largest that have bins at first
constexpr float kFarthest = 104;     // from there on a weight is 0
constexpr int kLevels = 3;           // of bins within bins; the last one's tell nothing apart
constexpr float kLog2BinUnit = 13;   // of a weight, as a share of that at its bin's beginning; fewer than 2^19 fit
constexpr float kLog2ListUnit = 20;  // the same in the list
constexpr int kMostWidenings = 26;   // from 16 to beyond all floats
constexpr uint32_t kWiden = ~0u;     // in place of a bin

template <class T, int kThreads>
class FloorSearch {
 public:
  __device__ FloorSearch(RowShared& shared, const RowPart<T>& part, Extremes extremes, float factor)
      : shared_(shared), part_(part), largest_(extremes.largest), rate_(factor * kLog2E) {
    const float range = fminf(largest_ - extremes.least, kNear / factor);
    first_width_ = fmaxf(range / (kBins - 1), fmaxf(fabsf(largest_) * 0x1p-20f, 1e-30f));  // offset_ is exact enough
  }

  float floor = kLeastFloat;  // of what may be drawn

  // Raise the floor to where the target is reached: a number of logits, or a share of the mass above the floor.
  template <bool kIsMass>
  __device__ void raise(float target) {
    level_ = 0, begin_ = 0;
    cover(first_width_);
    for (int widenings = 0;;) {
      const bool may_widen = widenings < kMostWidenings;
      const uint32_t bin = level_ == 0 ? count<kIsMass, false>(target, may_widen) : count<kIsMass, true>(target, false);
      if (bin == kWiden) {
        cover(width_ * 32), widenings++;
      } else {
        if (level_ == 0 ? settle<kIsMass, false>(bin) : settle<kIsMass, true>(bin)) return;
        descend(bin);
      }
    }
  }

 private:
  // Choose what each bin of the first level covers.
  __device__ void cover(float width) {
    width_ = width;
    scale_ = -1 / width;
    offset_ = largest_ / width;
  }

  // How many bins of this level a logit is behind where they begin. The first level's are above -1.
  template <bool kIsDeep>
  __device__ float locate(float value) const {
    const float distance = fmaf(value, scale_, offset_);
    if (!kIsDeep) return distance;
    const float within = (fmaxf(distance, 0) - first_bin_) * kBins;
    return level_ > 1 ? (within - second_bin_) * kBins : within;
  }

  __device__ void descend(uint32_t bin) {
    begin_ += float(bin) * width_;
    width_ /= kBins;
    (level_ == 0 ? first_bin_ : second_bin_) = float(bin);
    level_++;
  }

  // What a logit weighs, if the largest weighs 1; distance: where it is located.
  template <bool kIsMass, bool kIsDeep>
  __device__ float weigh(float value, float distance) const {
    if (!kIsMass) return 1;
    return kIsDeep ? exp2_fast((value - largest_) * rate_) : weigh_behind(distance, 0);
  }

  // What a logit weighs so far behind another, in bins, if that weighs 2^log2_unit.
  __device__ float weigh_behind(float distance, float log2_unit) const {
    return exp2_fast(fmaf(distance, -width_ * rate_, log2_unit));
  }

  template <class Visit>
  __device__ void for_each(Visit visit) const {
#pragma unroll 1  // the step's kernels share the instruction cache
    for (uint32_t i = threadIdx.x; i < part_.count; i += kThreads) {
      const Quad quad = part_.get(i);
#pragma unroll
      for (const float value : quad.values) visit(value, value >= floor);
    }
  }

  // The bin of this level in which the target is reached.
  template <bool kIsMass, bool kIsDeep>
  __device__ uint32_t count(float target, bool may_widen) {
#pragma unroll 1
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads) shared_.bins[bin] = 0;
    __syncthreads();
    cluster_arrive();  // all blocks have empty bins once all have waited
    float total = 0, above = 0;
    for_each([&](float value, bool counts) {
      const float distance = locate<kIsDeep>(value), weight = counts ? weigh<kIsMass, kIsDeep>(value, distance) : 0;
      if (kIsDeep)
        above += distance < 0 ? weight : 0;
      else
        total += weight;
      const int bin = int(distance);
      const uint32_t share = kIsMass ? __float2uint_rn(weigh_behind(distance - float(bin), kLog2BinUnit)) : 1u;
      if (counts && distance < kBins && (!kIsDeep || distance >= 0)) atomicAdd(&shared_.bins[bin], share);
    });
    add_up<kThreads>(shared_, total, above);
    cluster_wait();
    if (threadIdx.x == 0) tell_sums(above, total);
    if (cluster_rank() > 0) hand_over_bins();
    meet();
    if (cluster_rank() == 0) choose<kIsMass>(target, may_widen);
    meet();
    return shared_.chosen;
  }

  __device__ void tell_sums(float above, float total) {
    store_in_cluster(address_in(0, &shared_.above[cluster_rank()]), above);
    store_in_cluster(address_in(0, &shared_.total[cluster_rank()]), total);
  }

  __device__ void hand_over_bins() {
    const unsigned bins = address_in(0, shared_.bins);
#pragma unroll 1
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads)
      if (const uint32_t filled = shared_.bins[bin]) add_in_cluster(bins + bin * 4, filled);
  }

  // Tell all blocks the bin. Runs on: block 0.
  template <bool kIsMass>
  __device__ void choose(float target, bool may_widen) {
    constexpr int kOwn = kBins / kThreads;
    const float above = sum_of_blocks(shared_.above), total = sum_of_blocks(shared_.total);
    if (level_ == 0) wanted_ = kIsMass ? target * total : target;
    if (threadIdx.x == 0) shared_.reached = kBins, shared_.filled = 0, shared_.num_listed = 0, shared_.least_key = ~0u;
    float weights[kOwn], own = 0;
    const int first = threadIdx.x * kOwn;
#pragma unroll
    for (int i = 0; i < kOwn; i++) {
      const float sum = float(shared_.bins[first + i]);
      own += weights[i] =
          kIsMass ? sum * exp2_fast(-begin_ * rate_ - float(first + i) * width_ * rate_ - kLog2BinUnit) : sum;
    }
    float sum = above + add_up_before<kThreads>(shared_, own);  // synchronises
#pragma unroll
    for (int i = 0; i < kOwn; i++) {
      sum += weights[i];
      if (shared_.bins[first + i] == 0) continue;
      atomicMax(&shared_.filled, first + i);
      if (sum >= wanted_) atomicMin(&shared_.reached, first + i);
    }
    if (threadIdx.x == kThreads - 1) shared_.sum = sum;
    __syncthreads();
    if (threadIdx.x >= kRowCluster) return;
    // By rounding, or because there are not so many, the target may be beyond the last.
    const bool is_beyond = shared_.reached == kBins && level_ == 0 && may_widen;
    const bool has_more = kIsMass ? width_ * kBins * rate_ < kFarthest * kLog2E : shared_.sum < total;
    const uint32_t bin = shared_.reached < kBins ? shared_.reached : shared_.filled;
    store_in_cluster(address_in(threadIdx.x, &shared_.chosen), is_beyond && has_more ? kWiden : bin);
  }

  // Take the floor from what lies in the bin, or say that this is too much.
  template <bool kIsMass, bool kIsDeep>
  __device__ bool settle(uint32_t bin) {
    const float begin = float(bin), end = begin + 1;
    const bool is_last = level_ == kLevels - 1;
    float above = 0, none = 0;
    if (threadIdx.x == 0) shared_.num_own = 0;
    __syncthreads();
    const unsigned least = address_in(0, &shared_.least_key);
    for_each([&](float value, bool counts) {
      const float distance = locate<kIsDeep>(value);
      const bool is_nearer = distance < begin && (kIsDeep || bin > 0);
      above += counts && is_nearer ? weigh<kIsMass, kIsDeep>(value, distance) : 0;
      if (!counts || is_nearer || !(distance < end)) return;
      const uint32_t place = atomicAdd(&shared_.num_own, 1u);
      if (place < kMostListed) shared_.own[place] = value;
      if (is_last) lower_in_cluster(least, to_key(value));
    });
    add_up<kThreads>(shared_, above, none);  // synchronises
    if (threadIdx.x == 0) {
      tell_sums(above, 0);
      shared_.listed_before = add_in_cluster(address_in(0, &shared_.num_listed), shared_.num_own);
    }
    __syncthreads();
    const unsigned listed = address_in(0, shared_.listed);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < min(shared_.num_own, kMostListed); i += kThreads)
      if (const uint32_t place = shared_.listed_before + i; place < kMostListed)
        store_in_cluster(listed + place * 4, shared_.own[i]);
    meet();
    if (cluster_rank() == 0) compare<kIsMass, kIsDeep>(begin);
    meet();
    if (!shared_.settled) return false;
    floor = shared_.floor;
    return true;
  }

  // Tell all blocks the floor, if there is one. Runs on: block 0.
  template <bool kIsMass, bool kIsDeep>
  __device__ void compare(float begin) {
    const uint32_t count = shared_.num_listed;
    const bool is_last = level_ == kLevels - 1, fits = count <= kMostListed;
    if (!is_last && fits) {
#pragma unroll 1
      for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
        const float behind = locate<kIsDeep>(shared_.listed[i]) - begin;
        shared_.weights[i] = kIsMass ? __float2uint_rn(weigh_behind(behind, kLog2ListUnit)) : 1u;
      }
      __syncthreads();
      const float above = sum_of_blocks(shared_.above);
      const float unit = kIsMass ? exp2_fast((begin_ + begin * width_) * -rate_ - kLog2ListUnit) : 1;
#pragma unroll 1
      for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
        const float value = shared_.listed[i];
        uint32_t before = 0;
#pragma unroll 4
        for (uint32_t other = 0; other < count; other++)
          if (shared_.listed[other] > value) before += shared_.weights[other];
        if (before == 0 || float(before) * unit < wanted_ - above) atomicMin(&shared_.least_key, to_key(value));
      }
      __syncthreads();
    }
    if (threadIdx.x >= kRowCluster) return;
    store_in_cluster(address_in(threadIdx.x, &shared_.floor), from_key(shared_.least_key));
    store_in_cluster(address_in(threadIdx.x, &shared_.settled), uint32_t(is_last || fits));
  }

  RowShared& shared_;
  const RowPart<T>& part_;
  const float largest_, rate_;    // rate_: of a distance, for powers of 2
  float first_width_;             // of the first level's bins
  float begin_, width_;           // of this level: the distance where its bins begin, and what each covers
  float scale_, offset_;          // from a logit to its first level's bin
  float first_bin_, second_bin_;  // chosen
  float wanted_ = 0;              // block 0's
  int level_ = 0;
};

}  // namespace blink
