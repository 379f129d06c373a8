// SPDX-License-Identifier: Apache-2.0
// Attention of decoding rows, one token each, over the paged KV cache. A cluster of blocks serves one row and KV head:
// its warps split the keys. The row's new key and value come straight from the QKV product: this kernel normalises and
// rotates heads and writes the cache. All older keys are on their way to registers before it waits for that product.
#pragma once

#include "ptx.cuh"

namespace blink {

struct AttentionArgs {
  const Bf16* qkv;  // [rows, (kGroup + 2) * kv_heads * head_dim]
  Bf16* cache;      // [2, blocks, block_size, kv_heads, head_dim]
  long values;      // elements from keys to values
  const int* block_tables;
  const int* row_slots;     // [rows]
  const int* context_lens;  // [rows]; with the new token, 0 for padding
  const int* positions;     // [rows]
  const int* kv_slots;      // [rows]; where the new key and value go, -1: nowhere
  const float* rotary;      // [positions, kRotaryDim], cosines before sines
  const Bf16* query_norm;   // [head_dim], with kNorm
  const Bf16* key_norm;
  Bf16* out;  // [rows, kGroup * kv_heads * head_dim]
  float eps;
  float scale;  // of the scores, for powers of 2
  int table_stride;
};

constexpr int kTileKeys = 16;      // keys that a warp takes at once
constexpr float kLowest = -1e30f;  // below every score, and finite: differences are never NaN

template <int kGroup_, int kHeadDim_, int kRotaryDim_, int kKvHeads_, int kBlockSize_, int kCluster_, int kWarps_,
          bool kNorm_>
struct AttentionShape {
  static constexpr int group = kGroup_;  // query heads per KV head, up to 8
  static constexpr int head_dim = kHeadDim_;
  static constexpr int rotary_dim = kRotaryDim_;
  static constexpr int kv_heads = kKvHeads_;
  static constexpr int block_size = kBlockSize_;
  static constexpr int cluster = kCluster_;
  static constexpr int warps = kWarps_;
  static constexpr bool norm = kNorm_;
  static constexpr int steps = head_dim / 32;       // 16-byte loads of a key by each of its four lanes
  static constexpr int value_lanes = head_dim / 8;  // lanes of a value, 16 bytes each
  static constexpr int turns = kTileKeys * value_lanes / 32;
  static constexpr int dims = head_dim / 32;         // of each lane, where a warp holds one head
  static constexpr int token = kv_heads * head_dim;  // elements between tokens of the cache
  static_assert(group <= 8 && dims % 2 == 0 && rotary_dim / 2 % dims == 0 && rotary_dim <= head_dim);
};

template <class S>
struct Tile {  // a warp's keys, as the matrix instruction takes them, and values, a few dims of every few keys a lane
  Vec16 keys[2][S::steps];
  Vec16 values[S::turns];
};

template <class S>
struct AttentionShared {
  alignas(16) Bf16 queries[S::group][S::head_dim + 32];  // padded against bank conflicts
  alignas(16) Bf16 new_key[S::head_dim];
  alignas(16) float weights[S::warps][kTileKeys][8];
  float shrink[S::warps][8];
  alignas(16) float parts[S::warps][S::group][S::head_dim];
  float best[S::warps][S::group], total[S::warps][S::group];
  alignas(16) float block_part[S::group][S::head_dim];
  float block_best[S::group], block_total[S::group];
};

// Where one row's attention happens.
template <class S>
struct Place {
  int row, head, rank, warp, lane;
  int length;        // keys, the new one included
  const int* table;  // the row's blocks
  const Bf16* keys;  // of this head

  __device__ const Bf16* key(int index) const {
    return keys + (long(table[index / S::block_size]) * S::block_size + index % S::block_size) * S::token;
  }
};

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
struct Angles {  // of a lane's dims
  float cosines[S::dims], sines[S::dims];
};

template <class S>
__device__ inline Angles<S> load_angles(const AttentionArgs& args, const Place<S>& at) {
  constexpr int half = S::rotary_dim / 2;
  const int dim = at.lane * S::dims;
  const float* from = args.rotary + long(args.positions[at.row]) * S::rotary_dim;
  Angles<S> angles;
#pragma unroll
  for (int i = 0; i < S::dims; i++) {
    angles.cosines[i] = dim < 2 * half ? from[dim % half + i] : 1;
    const float sine = dim < 2 * half ? from[half + dim % half + i] : 0;
    angles.sines[i] = dim < half ? -sine : sine;
  }
  return angles;
}

// Normalise, if the model does, and rotate one head; a warp's lanes hold its dims. Rounds where single operations
// would.
template <class S>
__device__ inline void prepare_head(const Bf16* from, const Bf16* norm, float eps, const Angles<S>& angles, int lane,
                                    Bf16* to, Bf16* also_to) {
  constexpr int half = S::rotary_dim / 2 / S::dims;  // in lanes
  float values[S::dims], squares = 0;
#pragma unroll
  for (int i = 0; i < S::dims; i += 2) {
    unsigned pair;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(pair) : "l"(from + lane * S::dims + i) : "memory");
    values[i] = low_float(pair);
    values[i + 1] = high_float(pair);
    squares += values[i] * values[i] + values[i + 1] * values[i + 1];
  }
  if (S::norm) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
    const float rate = rsqrtf(squares / S::head_dim + eps);
#pragma unroll
    for (int i = 0; i < S::dims; i++)
      values[i] = to_float(to_bf16(values[i] * rate * to_float(norm[lane * S::dims + i])));
  }
  float rotated[S::dims];
#pragma unroll
  for (int i = 0; i < S::dims; i++) {
    const float other = __shfl_sync(~0u, values[i], lane < half ? lane + half : lane - half);
    rotated[i] = values[i] * angles.cosines[i] + (lane < 2 * half ? other * angles.sines[i] : 0);
  }
#pragma unroll
  for (int i = 0; i < S::dims; i += 2) {
    const unsigned pair = to_bf16_pair(rotated[i], rotated[i + 1]);
    *reinterpret_cast<unsigned*>(to + lane * S::dims + i) = pair;
    if (also_to) *reinterpret_cast<unsigned*>(also_to + lane * S::dims + i) = pair;
  }
}

// Prepare the queries, and in the block that owns the new token its key; write key and value to the cache.
template <class S>
__device__ inline void prepare_heads(const AttentionArgs& args, const Place<S>& at, const Angles<S>& angles, bool owner,
                                     AttentionShared<S>& shared) {
  constexpr int width = (S::group + 2) * S::token;
  const Bf16* qkv = args.qkv + long(at.row) * width;
  const long slot = args.kv_slots[at.row];
  Bf16* cell = slot < 0 ? nullptr : args.cache + slot * S::token + at.head * S::head_dim;
  for (int head = at.warp; head < S::group + int(owner); head += S::warps) {
    const bool is_key = head == S::group;
    const Bf16* from = qkv + (is_key ? S::group * S::kv_heads + at.head : at.head * S::group + head) * S::head_dim;
    prepare_head<S>(from, is_key ? args.key_norm : args.query_norm, args.eps, angles, at.lane,
                    is_key ? shared.new_key : shared.queries[is_key ? 0 : head], is_key ? cell : nullptr);
  }
  if (owner && cell && at.warp == S::warps - 1 && at.lane < S::value_lanes) {
    const Bf16* value = qkv + ((S::group + 1) * S::kv_heads + at.head) * S::head_dim;
    *reinterpret_cast<Vec16*>(cell + args.values + at.lane * 8) = load(value + at.lane * 8);
  }
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
