// SPDX-License-Identifier: Apache-2.0
// Softmax over keys that several warps and blocks have seen.
#pragma once

#include "kernels/attention/attention_shape.cuh"
#include "kernels/common/hi_lo.cuh"

namespace blink {

template <class S>
struct Running {  // softmax over the keys so far; the first two are of query head lane / 4
  float best = kLowest, total = 0;
  // Of each 16 dims two, 0 and 1 of the first and 2 and 3 of the second, of heads lane % 4 * 2 and the next.
  float attended[S::head_dim / 16][4] = {};

  __device__ static int dim(int lane, int i) { return S::fp8 ? lane / 4 * 2 + i / 2 : lane / 4 + i / 2 * 8; }
};

// Leave a warp's results in shared memory.
template <class S>
__device__ inline void leave_part(const Place<S>& at, AttentionShared<S>& shared, const Running<S>& running) {
#pragma unroll
  for (int dims = 0; dims < S::head_dim; dims += 16)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int head = at.lane % 4 * 2 + i % 2, dim = dims + Running<S>::dim(at.lane, i);
      if (head < S::group) shared.parts[at.warp][head * (S::head_dim + 4) + dim] = running.attended[dims / 16][i];
    }
  if (at.lane % 4 == 0 && at.lane / 4 < S::group) {
    shared.best[at.warp][at.lane / 4] = running.best;
    shared.total[at.warp][at.lane / 4] = running.total;
  }
}

// The outputs that a block of the cluster writes end there.
template <class S>
__device__ inline int end_of_share(const Place<S>& at) {
  return min((at.rank + 1) * S::share, S::outputs);
}

// Say what all blocks will send.
template <class S>
__device__ inline void expect_parts(const Place<S>& at, AttentionShared<S>& shared) {
  initialize(shared.exchanged, 1);
  expect(shared.exchanged, S::cluster * (max(end_of_share(at) - at.rank * S::share, 0) + 2 * S::group) * 4);
}

// Add up the block's parts, and send them, four outputs together, to the block that writes them.
template <class S>
__device__ inline void combine_block(const Place<S>& at, AttentionShared<S>& shared) {
#pragma unroll
  for (int i = threadIdx.x * 4; i < S::outputs; i += 32 * S::warps * 4) {
    const int head = i / S::head_dim, dim = i % S::head_dim;
    float best = kLowest, total = 0;
    float4 attended = {};
#pragma unroll
    for (int warp = 0; warp < S::warps; warp++) best = fmaxf(best, shared.best[warp][head]);
#pragma unroll
    for (int warp = 0; warp < S::warps; warp++) {
      const float weight = exp2f(shared.best[warp][head] - best);
      const float4 part = *reinterpret_cast<const float4*>(&shared.parts[warp][head * (S::head_dim + 4) + dim]);
      total += weight * shared.total[warp][head];
      attended.x += weight * part.x, attended.y += weight * part.y;
      attended.z += weight * part.z, attended.w += weight * part.w;
    }
    send<S::cluster>(i / S::share, attended, reinterpret_cast<float4&>(shared.from_part[at.rank][i % S::share]),
                     shared.exchanged);
    if (dim != 0) continue;
    for (int to = 0; to < S::cluster; to++) {
      send<S::cluster>(to, best, shared.from_best[at.rank][head], shared.exchanged);
      send<S::cluster>(to, total, shared.from_total[at.rank][head], shared.exchanged);
    }
  }
}

// Write one of the outputs of a KV head's queries.
template <class S, FormatId kWrites>
__device__ inline void write_attended(const AttentionArgs& args, const Place<S>& at, int i, Bf16 value) {
  constexpr int width = S::group * S::head_dim;
  const int column = at.head * width + i;
  const long row = long(at.row) * S::kv_heads * width;
  if constexpr (kWrites != FormatId::kBf16) {
    unsigned short numbers[kHiLo];
    split_pair(value.bits, numbers);
    char* to = reinterpret_cast<char*>(args.out) + row + packed_place<kWrites>(column);
#pragma unroll
    for (int half = 0; half < kHiLo; half++)
      to[half * long(gridDim.y) * S::kv_heads * width] = static_cast<char>(numbers[half]);
  } else {
    args.out[row + column] = value;
  }
}

// Add up the cluster's parts, each block some of the outputs, and write them. Without keys they are zero.
template <class S, FormatId kWrites>
__device__ inline void combine_cluster(const AttentionArgs& args, const Place<S>& at, AttentionShared<S>& shared) {
  for (int i = at.rank * S::share + int(threadIdx.x); i < end_of_share(at); i += 32 * S::warps) {
    const int head = i / S::head_dim;
    float best = kLowest, total = 0, attended = 0;
#pragma unroll
    for (int rank = 0; rank < S::cluster; rank++) best = fmaxf(best, shared.from_best[rank][head]);
#pragma unroll
    for (int rank = 0; rank < S::cluster; rank++) {
      const float weight = exp2f(shared.from_best[rank][head] - best);
      total += weight * shared.from_total[rank][head];
      attended += weight * shared.from_part[rank][i % S::share];
    }
    write_attended<S, kWrites>(args, at, i, to_bf16(total > 0 ? attended * args.value_scale / total : 0));
  }
}

}  // namespace blink
