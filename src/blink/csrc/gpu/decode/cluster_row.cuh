// SPDX-License-Identifier: Apache-2.0
// A cluster of thread blocks as a group that samples a row (sampler/row.h), and a block's part of that row.
#pragma once

#include "ptx.cuh"
#include "sampler/row.h"

namespace blink {

constexpr int kRowCluster = 8;

template <int kNumThreads>
struct ClusterGroup {
  using Real = float;
  using Units = uint32_t;
  static constexpr int kBlocks = kRowCluster, kThreads = kNumThreads, kSize = kBlocks * kThreads, kWarp = 32;
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

  __device__ uint32_t thread() const { return threadIdx.x; }
  __device__ uint32_t block() const { return cluster_rank(); }
  __device__ void sync() const { __syncthreads(); }
  __device__ void arrive() const { cluster_arrive(); }
  __device__ void wait() const { cluster_wait(); }
  __device__ void meet() const {
    cluster_arrive();
    cluster_wait();
  }
  template <class T>
  __device__ T from_lane_xor(T value, int mask) const {
    return __shfl_xor_sync(~0u, value, mask);
  }
  template <class T>
  __device__ T from_lane_before(T value, int step) const {
    return __shfl_up_sync(~0u, value, step);
  }
  template <class T>
  __device__ void tell(uint32_t other, T& word, T value) const {
    store_in_cluster(address_in(other, &word), value);
  }
  __device__ uint32_t add(uint32_t& word, uint32_t value) const { return atomicAdd(&word, value); }
  __device__ uint32_t add_in(uint32_t other, uint32_t& word, uint32_t value) const {
    return add_in_cluster(address_in(other, &word), value);
  }
  template <class T>
  __device__ void raise(T& word, T value) const {
    atomicMax(&word, value);
  }
  template <class T>
  __device__ void lower(T& word, T value) const {
    atomicMin(&word, value);
  }
  __device__ void lower_in(uint32_t other, uint32_t& word, uint32_t value) const {
    lower_in_cluster(address_in(other, &word), value);
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

struct Half {
  unsigned short bits;
};

// Four numbers as the model makes them.
template <class T>
struct alignas(4 * sizeof(T)) Raw {
  unsigned words[sizeof(T)];
};
__device__ inline Quad to_quad(const Raw<float>& raw) {
  return {{__uint_as_float(raw.words[0]), __uint_as_float(raw.words[1]), __uint_as_float(raw.words[2]),
           __uint_as_float(raw.words[3])}};
}
__device__ inline Quad to_quad(const Raw<Bf16>& raw) {
  return {{low_float(raw.words[0]), high_float(raw.words[0]), low_float(raw.words[1]), high_float(raw.words[1])}};
}
__device__ inline Quad to_quad(const Raw<Half>& raw) {
  return {{low_half(raw.words[0]), low_half(raw.words[0] >> 16), low_half(raw.words[1]), low_half(raw.words[1] >> 16)}};
}

// The block's part of a row: in its shared memory, or where it was.
template <class T>
struct RowPart {
  uint32_t first, count;  // in quads

  template <class Group>
  __device__ RowPart(const Group& group, uint32_t quads, T* staged) : staged_(reinterpret_cast<Raw<T>*>(staged)) {
    share_out(group, quads, first, count);
  }

  __device__ Quad get(uint32_t i) const { return outside_ ? outside_[i] : to_quad(staged_[i]); }

  __device__ void keep_outside(const float* row) { outside_ = reinterpret_cast<const Quad*>(row) + first; }

  // Each thread copies what it will read.
  template <class Group>
  __device__ void stage(const Group& group, const T* row) {
    const auto* from = reinterpret_cast<const Raw<T>*>(row) + first;
#pragma unroll 4
    for (uint32_t i = group.thread(); i < count; i += Group::kThreads) staged_[i] = from[i];
  }

 private:
  Raw<T>* staged_;
  const Quad* outside_ = nullptr;
};

}  // namespace blink
