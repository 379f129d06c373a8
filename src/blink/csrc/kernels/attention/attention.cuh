// SPDX-License-Identifier: Apache-2.0
// Attention of decoding rows, one token each, over the paged KV cache. A cluster of blocks serves one row and KV head:
// its warps split the keys, 16 at a time, which tensor copies bring to shared memory. The row's new key and value come
// straight from the QKV projection: this kernel normalises and rotates heads and writes the cache. Copies of older keys
// are under way before it waits for that GEMM.
//
// A warp has every 16 x kCluster x kWarps keys from its first on, whatever the number of keys. So with these two the
// same, a token's bits depend on its text alone. Tokens of prompts can be rows, too, once all of the step are stored.
#pragma once

#include "kernels/attention/attention_parts.cuh"
#include "kernels/attention/attention_siblings.cuh"

namespace blink {

constexpr int kStoredHeads = 4;  // of a block of store_heads()

// The block of the cache that holds a tile of this warp.
template <class S>
__device__ inline int load_block(const Place<S>& at, int turn) {
  return turn < at.count ? at.table[at.tile(turn) * kTileKeys / S::block_size] : 0;
}

template <class S>
__device__ inline void copy_tile(const AttentionArgs& args, const Place<S>& at, int turn, int block,
                                 AttentionShared<S>& shared) {
  Barrier& full = shared.full[at.warp][turn % S::stages];
  expect(full, sizeof(Tile<S>));
  const int token = block * S::block_size + at.tile(turn) * kTileKeys % S::block_size;
  copy_box_5d(&shared.pipeline[at.warp][turn % S::stages], args.cells, token, at.head, full, read_once_policy());
}

// Put the new key and value in their place of the last tile. Values behind them, whatever they are, become zeros: they
// are multiplied by 0.
template <class S>
__device__ inline void complete_tile(const Place<S>& at, AttentionShared<S>& shared, Tile<S>& tile) {
  const int newest = (at.length - 1) % kTileKeys;
  if (at.lane < S::chunks) {
    *tile.chunk(0, newest, at.lane) = reinterpret_cast<const Vec16*>(shared.new_key)[at.lane];
    *tile.chunk(1, newest, at.lane) = reinterpret_cast<const Vec16*>(shared.new_value)[at.lane];
  }
  for (int i = at.lane; i < (kTileKeys - 1 - newest) * S::chunks; i += 32)
    *tile.chunk(1, newest + 1 + i / S::chunks, i % S::chunks) = {};
  __syncwarp();
}

// The weights of a tile's keys: of query head lane / 4, pairs of keys lane % 4 and 4 more, of the first eight and the
// others. What was attended so far shrinks.
template <class S>
__device__ inline void weigh(const AttentionArgs& args, const Place<S>& at, int turn, const Query<S>& query,
                             Tile<S>& tile, Running<S>& running, unsigned (&weights)[2]) {
  float scores[2][4] = {};
#pragma unroll
  for (int step = 0; step < S::steps; step++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const Vec16 k = *tile.chunk(0, half * 8 + permute_key<S>(at.lane / 4), step * 4 + at.lane % 4);
      if constexpr (S::fp8) {
        multiply_key(scores[half], query.parts[2 * step], query.parts[2 * step + 1], k);
      } else {
        const Vec16 q = query.parts[step];
        multiply_add(scores[half], q.x, 0, q.y, 0, k.x, k.y);
        multiply_add(scores[half], q.z, 0, q.w, 0, k.z, k.w);
      }
    }
  const int first = at.tile(turn) * kTileKeys;
  const float scale = S::fp8 ? args.scale * kActivationDivisor : args.scale;
  float best = running.best;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float& score = scores[i / 2][i % 2];
    const int key = first + i / 2 * 8 + permute_key<S>(at.lane % 4 * 2 + i % 2);
    score = key < at.length ? score * scale : kLowest;
    best = fmaxf(best, score);
  }
  best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
  best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
  const float shrink = exp2f(running.best - best);
  running.total *= shrink;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float low = exp2f(scores[half][0] - best), high = exp2f(scores[half][1] - best);
    if constexpr (S::fp8) {
      weights[half] = to_half_pair(low, high);
      running.total += low + high;
    } else {
      weights[half] = to_bf16_pair(low, high);
      running.total += low_float(weights[half]) + high_float(weights[half]);
    }
  }
  running.best = best;
  const float even = __shfl_sync(~0u, shrink, at.lane % 4 * 8), odd = __shfl_sync(~0u, shrink, at.lane % 4 * 8 + 4);
#pragma unroll
  for (int i = 0; i < S::head_dim / 16 * 4; i++) running.attended[i / 4][i % 4] *= i % 2 ? odd : even;
}

template <class S>
__device__ inline void add_values(const Place<S>& at, Tile<S>& tile, const unsigned (&weights)[2],
                                  Running<S>& running) {
  const int key = at.lane / 16 * 8 + permute_key<S>(at.lane % 8);
#pragma unroll
  for (int dims = 0; dims < S::head_dim; dims += 16) {
    const Vec16 v = load_transposed(tile.chunk(1, key, dims / 8 + at.lane / 8 % 2));
    multiply_add(running.attended[dims / 16], v.x, v.y, v.z, v.w, weights[0], weights[1]);
  }
}

// Work through this warp's tiles, the first of which are being copied. block: of tile `lane`.
template <bool kSiblings, class S>
__device__ inline void attend_tiles(const AttentionArgs& args, const Place<S>& at, int block, int num_siblings,
                                    AttentionShared<S>& shared, Running<S>& running) {
  const Query<S> query(shared.queries[min(at.lane / 4, S::group - 1)], at.lane);
  const int last = (at.length - 1) / kTileKeys;
#pragma unroll 1
  for (int turn = 0; turn < at.count; turn++) {
    Tile<S>& tile = shared.pipeline[at.warp][turn % S::stages];
    wait(shared.full[at.warp][turn % S::stages], turn / S::stages % 2);
    if (kSiblings) complete_siblings(args, at, num_siblings, at.tile(turn) * kTileKeys, tile);
    if (at.tile(turn) == last) complete_tile(at, shared, tile);
    unsigned weights[2];
    weigh(args, at, turn, query, tile, running, weights);
    if constexpr (S::fp8)
      add_fp8_values(at, tile, weights, running.attended);
    else
      add_values(at, tile, weights, running);
    __syncwarp();
    const int next = turn + S::stages;
    if (next % 32 == 0) block = load_block(at, next + at.lane);
    if (next < at.count && at.lane == next % 32) copy_tile(args, at, next, block, shared);
  }
  running.total += __shfl_xor_sync(~0u, running.total, 1);
  running.total += __shfl_xor_sync(~0u, running.total, 2);
}

template <int kGroup, int kHeadDim, int kRotaryDim, int kKvHeads, int kBlockSize, int kCluster, int kWarps, int kStages,
          bool kNorm, bool kFp8, bool kSiblings, FormatId kWrites, bool kStored = false>
__global__ void __launch_bounds__(32 * kWarps) attend(const __grid_constant__ AttentionArgs args) {
  using S = AttentionShape<kGroup, kHeadDim, kRotaryDim, kKvHeads, kBlockSize, kCluster, kWarps, kStages, kNorm, kFp8>;
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<AttentionShared<S>*>(memory);
  launch_dependents();
  if (kStored) wait_for_prerequisites();
  const Place<S> at = find_place<S>(args, blockIdx.y, blockIdx.x / kCluster, kCluster > 1 ? int(cluster_rank()) : 0);

  const int block = load_block(at, at.lane);
  if (at.lane < kStages) initialize(shared.full[at.warp][at.lane], 1);
  if (kCluster > 1 && threadIdx.x == 0) expect_parts(at, shared);
  publish_barriers();
  __syncwarp();
  if (kCluster > 1) cluster_arrive_relaxed();  // all blocks have started once all have waited, below
  if (at.lane < kStages && at.lane < at.count) copy_tile(args, at, at.lane, block, shared);
  if (kNorm && at.warp == 0)
    prefetch_line((at.lane % 2 ? args.key_norm : args.query_norm) + at.lane / 2 * 8 % kHeadDim);
  const int num_siblings = kSiblings ? count_siblings(args, at.row, at.lane) : 0;
  const Angles<S> angles = load_angles<S>(args, at.row, at.lane);
  if (!kStored) wait_for_prerequisites();

  prepare_heads<kStored>(args, at, angles, at.owns_newest(), shared);
  __syncthreads();
  Running<S> running;
  attend_tiles<kSiblings>(args, at, block, num_siblings, shared, running);
  leave_part(at, shared, running);
  __syncthreads();
  if (kCluster > 1) cluster_wait();
  combine_block(at, shared);
  receive<kCluster>(shared.exchanged);
  combine_cluster<S, kWrites>(args, at, shared);
}

// Write keys and values to the cache, for attend() with kStored. A warp has one head of a token.
template <int kGroup, int kHeadDim, int kRotaryDim, int kKvHeads, int kBlockSize, bool kNorm, bool kFp8>
__global__ void __launch_bounds__(32 * kStoredHeads) store_heads(const __grid_constant__ AttentionArgs args) {
  using S = AttentionShape<kGroup, kHeadDim, kRotaryDim, kKvHeads, kBlockSize, 1, 1, 2, kNorm, kFp8>;
  launch_dependents();
  wait_for_prerequisites();
  const int head = blockIdx.x * kStoredHeads + threadIdx.x / 32;
  if (head < kKvHeads) store_head<S>(args, blockIdx.y, head, threadIdx.x % 32);
}

}  // namespace blink
