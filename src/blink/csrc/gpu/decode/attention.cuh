// SPDX-License-Identifier: Apache-2.0
// Attention of decoding rows, one token each, over the paged KV cache. A cluster of blocks serves one row and KV head:
// its warps split the keys. The row's new key and value come straight from the QKV product: this kernel normalises and
// rotates heads and writes the cache. All older keys are on their way to registers before it waits for that product.
#pragma once

#include "attention_heads.cuh"

namespace blink {

// Load a tile's keys and values but the new one, which is not in the cache yet.
template <class S>
__device__ inline void load_tile(const AttentionArgs& args, const Place<S>& at, int tile, Tile<S>& to) {
  const int old = at.length - 1;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int index = tile * kTileKeys + half * 8 + at.lane / 4;
    const bool inside = index < old;
    const Bf16* from = inside ? at.key(index) + at.lane % 4 * 8 : nullptr;
#pragma unroll
    for (int step = 0; step < S::steps; step++) to.keys[half][step] = inside ? load_once(from + step * 32) : Vec16{};
  }
#pragma unroll
  for (int turn = 0; turn < S::turns; turn++) {
    const int index = tile * kTileKeys + turn * (32 / S::value_lanes) + at.lane / S::value_lanes;
    to.values[turn] = index < old ? load_once(at.key(index) + args.values + at.lane % S::value_lanes * 8) : Vec16{};
  }
}

// Bring the tiles that this warp will take later to L2.
template <class S>
__device__ inline void fetch_later(const AttentionArgs& args, const Place<S>& at, int tile) {
  constexpr int stride = S::cluster * S::warps, most = 8;
  const int end = min((at.length + kTileKeys - 1) / kTileKeys, tile + (most + 1) * stride);
  for (int later = tile + stride; later < end; later += stride) {
    const int index = later * kTileKeys + at.lane / 2;
    if (index >= at.length - 1) continue;
    const Bf16* from = at.key(index) + at.lane % 2 * (S::head_dim / 2);
    prefetch_line(from);
    prefetch_line(from + args.values);
  }
}

// Put the new key and value in their place of the tile.
template <class S>
__device__ inline void insert_new(const AttentionArgs& args, const Place<S>& at, int tile, const Bf16* new_key,
                                  const Bf16* new_value, Tile<S>& to) {
  const int index = at.length - 1 - tile * kTileKeys;
#pragma unroll
  for (int half = 0; half < 2; half++)
    if (half * 8 + at.lane / 4 == index)
#pragma unroll
      for (int step = 0; step < S::steps; step++)
        to.keys[half][step] = *reinterpret_cast<const Vec16*>(new_key + at.lane % 4 * 8 + step * 32);
#pragma unroll
  for (int turn = 0; turn < S::turns; turn++)
    if (turn * (32 / S::value_lanes) + at.lane / S::value_lanes == index)
      to.values[turn] = load(new_value + at.lane % S::value_lanes * 8);
}

template <class S>
struct Running {  // softmax over the keys so far; the first two are of query head lane / 4
  float best = kLowest, total = 0;
  float attended[S::group][8] = {};  // of the lane's keys and dims
};

// The weights of a tile's keys to shared memory, from their scores.
template <class S>
__device__ inline void weigh(const AttentionArgs& args, const Place<S>& at, int tile, const Tile<S>& kv,
                             AttentionShared<S>& shared, Running<S>& running) {
  float scores[2][4] = {};
  const Bf16* query = shared.queries[min(at.lane / 4, S::group - 1)] + at.lane % 4 * 8;
#pragma unroll
  for (int step = 0; step < S::steps; step++) {
    const Vec16 q = *reinterpret_cast<const Vec16*>(query + step * 32);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const Vec16 k = kv.keys[half][step];
      multiply_add(scores[half], q.x, 0, q.y, 0, k.x, k.y);
      multiply_add(scores[half], q.z, 0, q.w, 0, k.z, k.w);
    }
  }
  const int first = tile * kTileKeys + at.lane % 4 * 2;
  float best = running.best;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float& score = scores[i / 2][i % 2];
    score = first + i / 2 * 8 + i % 2 < at.length ? score * args.scale : kLowest;
    best = fmaxf(best, score);
  }
  best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
  best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
  const float shrink = exp2f(running.best - best);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float weight = exp2f(scores[i / 2][i % 2] - best);
    sum += weight;
    shared.weights[at.warp][i / 2 * 8 + at.lane % 4 * 2 + i % 2][at.lane / 4] = weight;
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  running.total = running.total * shrink + sum;
  running.best = best;
  if (at.lane % 4 == 0) shared.shrink[at.warp][at.lane / 4] = shrink;
  __syncwarp();
}

template <class S>
__device__ inline void add_values(const Place<S>& at, const Tile<S>& kv, const AttentionShared<S>& shared,
                                  Running<S>& running) {
#pragma unroll
  for (int head = 0; head < S::group; head++) {
    const float shrink = shared.shrink[at.warp][head];
#pragma unroll
    for (int i = 0; i < 8; i++) running.attended[head][i] *= shrink;
  }
#pragma unroll
  for (int turn = 0; turn < S::turns; turn++) {
    const int key = turn * (32 / S::value_lanes) + at.lane / S::value_lanes;
    const Vec16 v = kv.values[turn];
    const float values[8] = {low_float(v.x), high_float(v.x), low_float(v.y), high_float(v.y),
                             low_float(v.z), high_float(v.z), low_float(v.w), high_float(v.w)};
#pragma unroll
    for (int head = 0; head < S::group; head++) {
      const float weight = shared.weights[at.warp][key][head];
#pragma unroll
      for (int i = 0; i < 8; i++) running.attended[head][i] += weight * values[i];
    }
  }
  __syncwarp();
}

// Leave a warp's results in shared memory, those of lanes with other keys added up.
template <class S>
__device__ inline void leave_part(const Place<S>& at, AttentionShared<S>& shared, Running<S>& running) {
#pragma unroll
  for (int head = 0; head < S::group; head++) {
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int step = 16; step >= S::value_lanes; step /= 2)
        running.attended[head][i] += __shfl_xor_sync(~0u, running.attended[head][i], step);
    if (at.lane < S::value_lanes)
#pragma unroll
      for (int i = 0; i < 8; i++) shared.parts[at.warp][head][at.lane * 8 + i] = running.attended[head][i];
  }
  if (at.lane % 4 == 0 && at.lane / 4 < S::group) {
    shared.best[at.warp][at.lane / 4] = running.best;
    shared.total[at.warp][at.lane / 4] = running.total;
  }
}

// Add up the block's parts.
template <class S>
__device__ inline void combine_block(AttentionShared<S>& shared) {
  for (int i = threadIdx.x; i < S::group * S::head_dim; i += 32 * S::warps) {
    const int head = i / S::head_dim, dim = i % S::head_dim;
    float best = kLowest, total = 0, attended = 0;
    for (int warp = 0; warp < S::warps; warp++) best = fmaxf(best, shared.best[warp][head]);
    for (int warp = 0; warp < S::warps; warp++) {
      const float weight = exp2f(shared.best[warp][head] - best);
      total += weight * shared.total[warp][head];
      attended += weight * shared.parts[warp][head][dim];
    }
    shared.block_part[head][dim] = attended;
    if (dim == 0) shared.block_best[head] = best, shared.block_total[head] = total;
  }
}

// Add up the cluster's parts, each block some of the outputs, and write them. Without keys they are zero.
template <class S>
__device__ inline void combine_cluster(const AttentionArgs& args, const Place<S>& at, AttentionShared<S>& shared) {
  constexpr int share = (S::group * S::head_dim + S::cluster - 1) / S::cluster;
  const int end = min((at.rank + 1) * share, S::group * S::head_dim);
  for (int i = at.rank * share + int(threadIdx.x); i < end; i += 32 * S::warps) {
    const int head = i / S::head_dim, dim = i % S::head_dim;
    float bests[S::cluster], totals[S::cluster], parts[S::cluster];
#pragma unroll
    for (int rank = 0; rank < S::cluster; rank++) {
      bests[rank] = load_in_cluster(address_in(rank, &shared.block_best[head]));
      totals[rank] = load_in_cluster(address_in(rank, &shared.block_total[head]));
      parts[rank] = load_in_cluster(address_in(rank, &shared.block_part[head][dim]));
    }
    float best = kLowest, total = 0, attended = 0;
#pragma unroll
    for (int rank = 0; rank < S::cluster; rank++) best = fmaxf(best, bests[rank]);
#pragma unroll
    for (int rank = 0; rank < S::cluster; rank++) {
      const float weight = exp2f(bests[rank] - best);
      total += weight * totals[rank];
      attended += weight * parts[rank];
    }
    const long place = (long(at.row) * S::kv_heads + at.head) * S::group * S::head_dim + i;
    args.out[place] = to_bf16(total > 0 ? attended / total : 0);
  }
}

template <int kGroup, int kHeadDim, int kRotaryDim, int kKvHeads, int kBlockSize, int kCluster, int kWarps, bool kNorm>
__global__ void __launch_bounds__(32 * kWarps) attend(const AttentionArgs args) {
  using S = AttentionShape<kGroup, kHeadDim, kRotaryDim, kKvHeads, kBlockSize, kCluster, kWarps, kNorm>;
  __shared__ AttentionShared<S> shared;
  launch_dependents();
  Place<S> at;
  at.row = blockIdx.y;
  at.head = blockIdx.x / kCluster;
  at.rank = kCluster > 1 ? int(cluster_rank()) : 0;
  at.warp = threadIdx.x / 32;
  at.lane = threadIdx.x % 32;
  at.length = args.context_lens[at.row];
  at.table = args.block_tables + long(args.row_slots[at.row]) * args.table_stride;
  at.keys = args.cache + at.head * kHeadDim;
  const int num_tiles = (at.length + kTileKeys - 1) / kTileKeys;
  const int last = num_tiles - 1;  // the tile of the new key

  Tile<S> kv;
  int tile = at.warp * kCluster + at.rank;
  load_tile(args, at, tile, kv);
  fetch_later(args, at, tile);
  if (kNorm && at.warp == 0)
    prefetch_line((at.lane % 2 ? args.key_norm : args.query_norm) + at.lane / 2 * 8 % kHeadDim);
  const Angles<S> angles = load_angles(args, at);
  wait_for_prerequisites();

  const bool owner = num_tiles > 0 && last % kCluster == at.rank;
  prepare_heads(args, at, angles, owner, shared);
  __syncthreads();
  Running<S> running;
  const Bf16* new_value = args.qkv + (long(at.row) * (kGroup + 2) + kGroup + 1) * S::token + at.head * kHeadDim;
  while (tile < num_tiles) {
    if (tile == last) insert_new(args, at, tile, shared.new_key, new_value, kv);
    weigh(args, at, tile, kv, shared, running);
    add_values(at, kv, shared, running);
    tile += kCluster * kWarps;
    if (tile < num_tiles) load_tile(args, at, tile, kv);
  }
  leave_part(at, shared, running);
  __syncthreads();
  combine_block(shared);
  if (kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  combine_cluster(args, at, shared);
  if (kCluster > 1) {  // nobody may leave while others read its shared memory
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace blink
