// SPDX-License-Identifier: Apache-2.0
// Which experts a few decoding rows choose, from the router's logits. Every block that works on experts finds out for
// itself: that takes less time than one more kernel.
#pragma once

#include "kernels/args.h"
#include "kernels/common/ptx.cuh"

namespace blink {

template <int kRows, int kExperts, int kTopK>
struct Routing {  // in shared memory
  static constexpr int rows = kRows, experts = kExperts, top_k = kTopK, words = kExperts / 32;
  static constexpr int most = kRows * kTopK < kExperts ? kRows * kTopK : kExperts;
  static_assert(kExperts % 32 == 0 && kTopK <= kExperts);

  unsigned chosen[kRows][words];  // a bit for each expert
  float weights[kRows][kTopK];    // of the chosen ones, in the experts' order
  int list[most];                 // the experts that any row has chosen, in order
  int count;

  __device__ bool has(int row, int expert) const { return chosen[row][expert / 32] >> expert % 32 & 1; }

  // How many experts before this one the row has chosen.
  __device__ int place(int row, int expert) const {
    int before = __popc(chosen[row][expert / 32] & ((1u << expert % 32) - 1));
    for (int word = 0; word < expert / 32; word++) before += __popc(chosen[row][word]);
    return before;
  }
};

// Numbers that are in the order of the logits, and of equal ones the lower expert's is the larger. Never 0.
__device__ inline unsigned routing_key(unsigned logit, int expert) {
  if (logit == 0x8000) logit = 0;  // -0 equals 0
  const unsigned ordered = logit & 0x8000 ? ~logit & 0xffff : logit | 0x8000;
  return ordered << 16 | (0xffff - expert);
}

__device__ inline float key_logit(unsigned key) {
  const unsigned ordered = key >> 16;
  return __uint_as_float((ordered & 0x8000 ? ordered & 0x7fff : ~ordered & 0xffff) << 16);
}

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// Weigh the experts in `taken`, whose logits the lane's keys hold.
template <class R>
__device__ inline void weigh_experts(const RoutingArgs& args, int row, const unsigned (&keys)[R::words],
                                     const bool (&taken)[R::words], unsigned largest, R& to) {
  const int lane = threadIdx.x % 32;
  float values[R::words], all = 0, mine = 0;
#pragma unroll
  for (int i = 0; i < R::words; i++) {
    values[i] = __expf(key_logit(keys[i]) - key_logit(largest));
    all += values[i];
    if (taken[i]) mine += values[i];
  }
  const float mass = warp_sum(args.renormalize ? mine : all);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < R::words; i++)
    if (taken[i]) to.weights[row][to.place(row, i * 32 + lane)] = values[i] / mass;
}

// Let kWarps warps choose the rows' experts, each of some rows at once; lane l looks at expert l of each word.
template <bool kWeights, int kWarps, class R>
__device__ inline void choose_rows(const RoutingArgs& args, R& to) {
  constexpr int at_once = (R::rows + kWarps - 1) / kWarps;
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32;
  if (first >= R::rows) return;  // all blocks want the same few lines at once: no load too many
  unsigned keys[at_once][R::words] = {}, largest[at_once];
  bool taken[at_once][R::words] = {};
#pragma unroll
  for (int j = 0; j < at_once; j++)
#pragma unroll
    for (int i = 0; i < R::words && first + j * kWarps < R::rows; i++) {
      const Bf16 logit = load_from_l2(args.logits + (first + j * kWarps) * R::experts + i * 32 + lane);
      keys[j][i] = routing_key(logit.bits, i * 32 + lane);
    }
#pragma unroll
  for (int rank = 0; rank < R::top_k; rank++)
#pragma unroll
    for (int j = 0; j < at_once; j++) {
      unsigned best = 0;
#pragma unroll
      for (int i = 0; i < R::words; i++) best = max(best, taken[j][i] ? 0 : keys[j][i]);
      best = __reduce_max_sync(~0u, best);
#pragma unroll
      for (int i = 0; i < R::words; i++) taken[j][i] |= keys[j][i] == best;
      if (rank == 0) largest[j] = best;
    }
#pragma unroll
  for (int j = 0; j < at_once; j++) {
    const int row = first + j * kWarps;
    if (row >= R::rows) break;
    const bool active = args.context_lens[row] > 0;
#pragma unroll
    for (int i = 0; i < R::words; i++) {
      const unsigned word = __ballot_sync(~0u, taken[j][i]);
      if (lane == 0) to.chosen[row][i] = active ? word : 0;
    }
    if (kWeights && active) weigh_experts(args, row, keys[j], taken[j], largest[j], to);
  }
}

// List the experts that any row has chosen, a warp those of a word.
template <int kWarps, class R>
__device__ inline void list_experts(R& to) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned words[R::words];
#pragma unroll
  for (int i = 0; i < R::words; i++) words[i] = __reduce_or_sync(~0u, lane < R::rows ? to.chosen[lane][i] : 0);
  int before = 0;
#pragma unroll
  for (int i = 0; i < R::words; i++) {
    if (i % kWarps == warp && words[i] >> lane & 1)
      to.list[before + __popc(words[i] & ((1u << lane) - 1))] = i * 32 + lane;
    before += __popc(words[i]);
  }
  if (threadIdx.x == 0) to.count = before;
}

// Let a block of kWarps warps choose all rows' experts and list them.
template <bool kWeights, int kWarps, class R>
__device__ inline void choose_experts(const RoutingArgs& args, R& to) {
  static_assert(R::rows <= 32);
  choose_rows<kWeights, kWarps>(args, to);
  __syncthreads();
  list_experts<kWarps>(to);
  __syncthreads();
}

}  // namespace blink
