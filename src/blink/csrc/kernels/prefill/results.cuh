// SPDX-License-Identifier: Apache-2.0
// What becomes of a tile's sums: results, or one of several parts, which the block that ends last adds up.
#pragma once

#include "kernels/prefill/softmax.cuh"

namespace blink {

// Where a pair's row stands among those of all tokens and heads.
template <class S>
__device__ inline long row_of_pair(const PromptItem& item, int head, int pair) {
  return ((long(item.first_token) + pair / S::group) * S::kv_heads + head) * S::group + pair % S::group;
}

// Which of all pairs' parts a chunk leaves.
template <class S>
__device__ inline long part_of_pair(int partial, int head, int pair) {
  return (long(partial) * S::kv_heads + head) * S::pairs + pair;
}

// Write what a thread has of a tile whose keys are all here, or leave it as a part. dim: the first of its warpgroup.
template <class S, class Place, int kCount>
__device__ inline void write_sums(const PromptArgs& args, const PromptItem& item, int head, const Place& at,
                                  const float (&attended)[kCount], const PromptSums& sums, int dim = 0) {
#pragma unroll
  for (int row = 0; row < 2; row++) {
    float total = sums.total[row];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const int pair = at.pair(row), column = dim + at.lane % 4 * 2;
    if (pair >= item.num_queries * S::group) continue;
    const float seen = total > 0 ? total : 1, rate = 1 / seen;
    Bf16* out = args.out + row_of_pair<S>(item, head, pair) * S::width + column;
    const long place = part_of_pair<S>(item.partial, head, pair);
    float* part = args.partials + place * S::width + column;
#pragma unroll
    for (int i = 0; i < kCount / 4; i++) {
      const float low = attended[4 * i + 2 * row] * rate, high = attended[4 * i + 2 * row + 1] * rate;
      if (item.num_chunks == 1)
        *reinterpret_cast<unsigned*>(out + 8 * i) = to_bf16_pair(low, high);
      else
        *reinterpret_cast<float2*>(part + 8 * i) = {low, high};
    }
    if (item.num_chunks > 1 && column == 0) args.lses[place] = sums.best[row] * args.scale + log2f(seen);
  }
}

// Tell whether all other chunks of the tile have left their parts; is_last: of shared memory.
template <class S>
__device__ inline bool ends_tile(const PromptArgs& args, const PromptItem& item, int head, int& is_last) {
  sync_multiplying();
  if (threadIdx.x == 0) {
    int* counter = args.counters + item.first_partial * S::kv_heads + head;
    is_last = count_part(counter) == item.num_chunks - 1;
    if (is_last) *counter = 0;
  }
  sync_multiplying();
  return is_last;
}

// Write the mean of a tile's parts, weighted with their sums of exponentials: a warp one pair after the other.
template <class S>
__device__ inline void combine_parts(const PromptArgs& args, const PromptItem& item, int head) {
  constexpr int quads = S::width / 128;  // of numbers, of each lane
  const int lane = threadIdx.x % 32;
  for (int pair = threadIdx.x / 32; pair < item.num_queries * S::group; pair += kTileThreads / 32) {
    float best = kNoScore, total = 0;
    float4 sum[quads] = {};
#pragma unroll 4
    for (int chunk = 0; chunk < item.num_chunks; chunk++) {
      const long place = part_of_pair<S>(item.first_partial + chunk, head, pair);
      const float lse = load_from_l2(args.lses + place), higher = fmaxf(best, lse);
      const float weight = exp2_fast(lse - higher), shrink = exp2_fast(best - higher);
#pragma unroll
      for (int i = 0; i < quads; i++) {
        const auto* from = reinterpret_cast<const float4*>(args.partials + place * S::width) + i * 32 + lane;
        const float4 part = load_from_l2(from);
        sum[i].x = sum[i].x * shrink + part.x * weight, sum[i].y = sum[i].y * shrink + part.y * weight;
        sum[i].z = sum[i].z * shrink + part.z * weight, sum[i].w = sum[i].w * shrink + part.w * weight;
      }
      total = total * shrink + weight, best = higher;
    }
    Bf16* out = args.out + row_of_pair<S>(item, head, pair) * S::width + lane * 4;
#pragma unroll
    for (int i = 0; i < quads; i++)
      *reinterpret_cast<uint2*>(out + i * 128) = {to_bf16_pair(sum[i].x / total, sum[i].y / total),
                                                  to_bf16_pair(sum[i].z / total, sum[i].w / total)};
  }
}

// The same, if the block ends last of those that have chunks of the tile.
template <class S>
__device__ inline void combine_if_last(const PromptArgs& args, const PromptItem& item, int head, int& is_last) {
  if (item.num_chunks > 1 && ends_tile<S>(args, item, head, is_last)) combine_parts<S>(args, item, head);
}

}  // namespace blink
