// SPDX-License-Identifier: Apache-2.0
// A row of logits that a cluster of thread blocks shares out, and sums over it.
#pragma once

#include "ptx.cuh"
#include "scheduler/state.h"

namespace blink {

constexpr int kRowCluster = 8;
constexpr int kMostRowWarps = 32;
constexpr int kBins = 1024;
constexpr uint32_t kMostListed = 512;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);
constexpr float kLeastFloat = -3.4028234e38f, kLog2E = 1.44269504f;

struct Half {
  unsigned short bits;
};

struct alignas(16) Quad {
  float values[4];
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

// Keys in the order of float values.
__device__ inline uint32_t to_key(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline float from_key(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

__device__ inline bool is_finite(float value) { return fabsf(value) < kInfinity; }

struct alignas(16) RowShared {
  uint32_t bins[kBins];
  float own[kMostListed];  // what lies in the chosen bin, of this block's part
  float of_warps[2][kMostRowWarps];
  float values[kMostRowWarps];  // winners of warps
  uint32_t tokens[kMostRowWarps];
  uint32_t num_own, listed_before, best_key;
  // From other blocks.
  float largest[kRowCluster], least[kRowCluster];
  uint32_t chosen, settled;
  float floor;
  // Block 0's.
  float above[kRowCluster], total[kRowCluster], block_values[kRowCluster];
  uint32_t block_tokens[kRowCluster];
  float listed[kMostListed], sum;
  uint32_t weights[kMostListed], num_listed, least_key;
  int reached, filled;  // bins: the first, the last
};

// A word that other threads change meanwhile.
__device__ inline uint32_t peek(const uint32_t& word) { return *const_cast<const volatile uint32_t*>(&word); }

__device__ inline void meet() {
  cluster_arrive();
  cluster_wait();
}

// The block's part of a row: in its shared memory, or where it was.
template <class T>
struct RowPart {
  uint32_t first, count;  // in quads

  __device__ RowPart(uint32_t quads, T* staged) : staged_(reinterpret_cast<Raw<T>*>(staged)) {
    const uint32_t share = (quads + kRowCluster - 1) / kRowCluster;
    first = min(cluster_rank() * share, quads);
    count = min(share, quads - first);
  }

  __device__ Quad get(uint32_t i) const { return outside_ ? outside_[i] : to_quad(staged_[i]); }

  // Visit each logit and its token.
  template <int kThreads, class Visit>
  __device__ void for_each(Visit visit) const {
#pragma unroll 1  // the step's kernels share the instruction cache
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const Quad quad = get(i);
#pragma unroll
      for (int j = 0; j < 4; j++) visit(quad.values[j], (first + i) * 4 + j);
    }
  }

  __device__ void keep_outside(const float* row) { outside_ = reinterpret_cast<const Quad*>(row) + first; }

  // Each thread copies what it will read.
  template <int kThreads>
  __device__ void stage(const T* row) {
    const auto* from = reinterpret_cast<const Raw<T>*>(row) + first;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) staged_[i] = from[i];
  }

 private:
  Raw<T>* staged_;
  const Quad* outside_ = nullptr;
};

// What blocks have told block 0, in their order.
__device__ inline float sum_of_blocks(const float* told) {
  float sum = 0;
  for (int other = 0; other < kRowCluster; other++) sum += told[other];
  return sum;
}

struct Extremes {
  float largest;  // NaN if there is one
  float least;    // -inf if there is one
};

// Every thread of the cluster gets those of the row.
template <class T, int kThreads>
__device__ Extremes find_extremes(RowShared& shared, const RowPart<T>& part) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float largest = -kInfinity, least = kInfinity;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < part.count; i += kThreads) {
    const Quad quad = part.get(i);
#pragma unroll
    for (const float value : quad.values) largest = max_or_nan(largest, value), least = fminf(least, value);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    largest = max_or_nan(largest, __shfl_xor_sync(~0u, largest, step));
    least = fminf(least, __shfl_xor_sync(~0u, least, step));
  }
  if (lane == 0) shared.of_warps[0][warp] = largest, shared.of_warps[1][warp] = least;
  __syncthreads();
  if (threadIdx.x < kRowCluster) {
    for (int other = 0; other < kThreads / 32; other++) {
      largest = max_or_nan(largest, shared.of_warps[0][other]);
      least = fminf(least, shared.of_warps[1][other]);
    }
    store_in_cluster(address_in(threadIdx.x, &shared.largest[cluster_rank()]), largest);
    store_in_cluster(address_in(threadIdx.x, &shared.least[cluster_rank()]), least);
  }
  meet();
  for (int other = 0; other < kRowCluster; other++) {
    largest = max_or_nan(largest, shared.largest[other]);
    least = fminf(least, shared.least[other]);
  }
  return {largest, least};
}

// Add up over the block's threads; its first thread gets the sums.
template <int kThreads>
__device__ void add_up(RowShared& shared, float& a, float& b) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    a += __shfl_xor_sync(~0u, a, step);
    b += __shfl_xor_sync(~0u, b, step);
  }
  if (lane == 0) shared.of_warps[0][warp] = a, shared.of_warps[1][warp] = b;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int other = 1; other < kThreads / 32; other++) a += shared.of_warps[0][other], b += shared.of_warps[1][other];
}

// Add up the numbers of the block's threads before this one.
template <int kThreads>
__device__ float add_up_before(RowShared& shared, float own) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) shared.of_warps[0][warp] = sum;
  const float before = __shfl_up_sync(~0u, sum, 1);
  __syncthreads();
  float base = 0;
  for (int other = 0; other < warp; other++) base += shared.of_warps[0][other];
  return lane > 0 ? base + before : base;
}

}  // namespace blink
