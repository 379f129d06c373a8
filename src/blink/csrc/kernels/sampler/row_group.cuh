// SPDX-License-Identifier: Apache-2.0
// The groups of a GPU's threads that sample a row (sampler/row.h): a cluster of blocks on Hopper, elsewhere one block.
#pragma once

#include "kernels/common/ptx.cuh"
#include "sampler/draw.h"

namespace blink {

constexpr int kRowCluster = 8;

// What a group has in common with the other: a block's threads, and the numbers.
template <int kNumBlocks, int kNumThreads>
struct DeviceGroup {
  using Real = float;
  using Units = uint32_t;
  static constexpr int kBlocks = kNumBlocks, kThreads = kNumThreads, kWarp = 32;
  static constexpr float kLog2BinUnit =
      13;  // of a weight, as a share of that at its bin's beginning; fewer than 2^19 fit
  static constexpr float kLog2ListUnit = 20;  // the same in the list

  class Range {
   public:
    __device__ void take(const Quad& quad) {
      BLINK_UNROLLED
      for (const float value : quad.values) largest_ = max_or_nan(largest_, value), smallest_ = fminf(smallest_, value);
    }
    __device__ float largest() const { return largest_; }
    __device__ float smallest() const { return smallest_; }

   private:
    float largest_ = -kInfinity, smallest_ = kInfinity;
  };

  // Finds the first of the largest, or a NaN, and where it is.
  class Peak {
   public:
    __device__ void take(const Quad& quad, uint32_t i) {
      float largest = quad.values[0];
      BLINK_UNROLLED
      for (int j = 1; j < 4; j++) largest = max_or_nan(largest, quad.values[j]);
      const bool rises = largest > largest_ || largest != largest;
      largest_ = rises ? largest : largest_;
      quad_ = rises ? i : quad_;
    }
    template <class Part>
    __device__ Winner found(const Part& part) const {
      if (largest_ == -kInfinity) return {-kInfinity, ~0u};
      const Quad quad = part.get(quad_);
      uint32_t place = 0;
      BLINK_UNROLLED
      for (int j = 3; j >= 0; j--) place = quad.values[j] == largest_ ? j : place;
      return {largest_, (part.first + quad_) * 4 + place};
    }

   private:
    float largest_ = -kInfinity;
    uint32_t quad_ = 0;
  };

  __device__ uint32_t thread() const { return threadIdx.x; }
  __device__ void sync() const { __syncthreads(); }
  template <class T>
  __device__ T from_lane_xor(T value, int mask) const {
    return __shfl_xor_sync(~0u, value, mask);
  }
  template <class T>
  __device__ T from_lane_before(T value, int step) const {
    return __shfl_up_sync(~0u, value, step);
  }
  __device__ uint32_t add(uint32_t& word, uint32_t value) const { return atomicAdd(&word, value); }
  __device__ void set_bits(uint32_t& word, uint32_t bits) const { atomicOr(&word, bits); }
  template <class T>
  __device__ void raise(T& word, T value) const {
    atomicMax(&word, value);
  }
  template <class T>
  __device__ void lower(T& word, T value) const {
    atomicMin(&word, value);
  }
  // A word that other threads change meanwhile.
  __device__ uint32_t peek(const uint32_t& word) const { return *const_cast<const volatile uint32_t*>(&word); }

  __device__ float larger(float a, float b) const { return max_or_nan(a, b); }
  __device__ float smaller(float a, float b) const { return fminf(a, b); }
  __device__ float exp2(float exponent) const { return exp2_fast(exponent); }
  __device__ float log(float value) const { return logf(value); }
  __device__ float multiply_add(float a, float b, float c) const { return fmaf(a, b, c); }
  __device__ uint32_t round(float value) const { return __float2uint_rn(value); }
};

template <int kNumThreads>
struct ClusterGroup : DeviceGroup<kRowCluster, kNumThreads> {
  static constexpr bool kIsStaged = true;
  static constexpr int kLoads = 1;  // from shared memory

  __device__ uint32_t block() const { return cluster_rank(); }
  __device__ void arrive() const { cluster_arrive(); }
  __device__ void wait() const { cluster_wait(); }
  __device__ void meet() const {
    cluster_arrive();
    cluster_wait();
  }
  template <class T>
  __device__ void tell(uint32_t other, T& word, T value) const {
    store_in_cluster(address_in(other, &word), value);
  }
  __device__ uint32_t add_in(uint32_t other, uint32_t& word, uint32_t value) const {
    return add_in_cluster(address_in(other, &word), value);
  }
  __device__ void lower_in(uint32_t other, uint32_t& word, uint32_t value) const {
    lower_in_cluster(address_in(other, &word), value);
  }
};

// Its shared memory does not hold a row.
template <int kNumThreads>
struct BlockGroup : DeviceGroup<1, kNumThreads> {
  static constexpr bool kIsStaged = false;
  static constexpr int kLoads = 4;

  __device__ uint32_t block() const { return 0; }
  __device__ void arrive() const {}
  __device__ void wait() const {}
  __device__ void meet() const { __syncthreads(); }
  template <class T>
  __device__ void tell(uint32_t, T& word, T value) const {
    word = value;
  }
  __device__ uint32_t add_in(uint32_t, uint32_t& word, uint32_t value) const { return atomicAdd(&word, value); }
  __device__ void lower_in(uint32_t, uint32_t& word, uint32_t value) const { atomicMin(&word, value); }
};

}  // namespace blink
