// SPDX-License-Identifier: Apache-2.0
// Attention of rows with many queries over the paged KV cache, on Hopper. A block takes 128 pairs of query and query
// head of one KV head, half of them for each of two warpgroups. It takes one chunk of their keys, the last ones first.
// A third warpgroup copies keys and values ahead. While a warpgroup weighs the scores of a tile of keys, the values of
// the tile before are multiplied. The two begin their GEMMs in turn: Shah et al., FlashAttention-3 (arXiv 2407.08608).
#include "kernels/prefill/results.cuh"

namespace blink {

// Copy the cache's blocks of a tile, one for each of the first lanes.
template <class S>
__device__ inline void copy_cells(const PromptArgs& args, Kind kind, int turn, int head, int block, int blocks,
                                  PromptShared& shared) {
  const int lane = threadIdx.x % 32, slot = turn % kPipelineTiles;
  constexpr int bytes = S::block_size * kCellBytes;
  if (turn >= kPipelineTiles) wait(shared.empty[kind][slot], (turn / kPipelineTiles - 1) % 2);
  if (lane == 0) expect(shared.full[kind][slot], blocks * bytes);
  __syncwarp();
  if (lane >= blocks) return;
  copy_box_5d(shared.tiles[kind][slot] + lane * bytes, args.cells, head * 2, block * (S::block_size / 8), kind,
              shared.full[kind][slot]);
}

// What the copying warp does: keys, then values of each tile, from the last on.
template <class S>
__device__ inline void copy_tiles(const PromptArgs& args, const PromptItem& item, int head, PromptShared& shared) {
  const int tiles = count_tiles(item), lane = threadIdx.x % 32;
  const int* table = args.block_tables + long(item.row_slot) * args.table_stride;
  const auto find_block = [&](int turn) {
    const int place = first_of(item, turn) / S::block_size + lane;
    return turn < tiles && lane < S::blocks && place * S::block_size < item.end_key ? table[place] : 0;
  };
  int block = find_block(0);
  for (int turn = 0; turn < tiles; turn++) {
    const int next = find_block(turn + 1);
    const int keys = min(item.end_key - first_of(item, turn), kTileKeys);
    const int blocks = (keys + S::block_size - 1) / S::block_size;
    copy_cells<S>(args, kKeys, turn, head, block, blocks, shared);
    copy_cells<S>(args, kValues, turn, head, block, blocks, shared);
    block = next;
  }
}

// Where a thread's rows of the sums stand: row 0 and 1 are pairs eight apart.
template <class S>
struct PromptPlace {
  int group, warp, lane;  // the warpgroup, the warp within it
  LastKeys keys;

  __device__ PromptPlace(const PromptItem& item) {
    group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    for (int row = 0; row < 2; row++) keys.of[row] = last_key(item, pair(row) / S::group);
    keys.least = last_key(item, group * 64 / S::group);
  }

  __device__ int pair(int row) const { return group * 64 + warp * 16 + row * 8 + lane / 4; }
};

// Bring the warpgroup's queries to shared memory, as boxes; those that there are not are zeros.
template <class S>
__device__ inline void load_queries(const PromptArgs& args, const PromptItem& item, int head, PromptShared& shared) {
  const int group = threadIdx.x / 128;
#pragma unroll
  for (int i = threadIdx.x % 128; i < 64 * 16; i += 128) {
    const int row = i / 16, chunk = i % 16, pair = group * 64 + row;
    const bool inside = pair < item.num_queries * S::group;
    const Vec16 part = inside ? load(args.query + row_of_pair<S>(item, head, pair) * S::width + chunk * 8) : Vec16{};
    char* to = shared.queries[group] + chunk / 8 * 8192 + row * 128 + (chunk % 8 ^ row % 8) * 16;
    *reinterpret_cast<Vec16*>(to) = part;
  }
  publish_stores();
  sync_warpgroup(group);
}

// Values behind the last key, whatever they are, become zeros: they are multiplied by 0.
__device__ inline void clear_values_behind(const PromptItem& item, PromptShared& shared) {
  const int keys = item.end_key - first_of(item, 0);
  if (keys >= kTileKeys) return;
  wait(shared.full[kValues][0], 0);
  for (int i = threadIdx.x; i < (kTileKeys - keys) * 16; i += kTileThreads) {
    const int key = keys + i / 16, half = i / 8 % 2;
    char* row = shared.tiles[kValues][0] + key / 8 * 2048 + half * 1024 + key % 8 * 128;
    reinterpret_cast<Vec16*>(row)[i % 8] = {};
  }
  publish_stores();
  sync_multiplying();
}

// Begin to multiply the warpgroup's queries with a tile of keys.
__device__ inline void begin_scores(float (&scores)[64], int turn, PromptShared& shared) {
  const int slot = turn % kPipelineTiles;
  wait(shared.full[kKeys][slot], turn / kPipelineTiles % 2);
  const unsigned long long queries = describe_box(shared.queries[threadIdx.x / 128]);
  const unsigned long long keys = describe_cells(shared.tiles[kKeys][slot]);
  fence_wgmma();
  multiply_keys<false>(scores, queries, keys);
#pragma unroll
  for (int step = 1; step < 8; step++)  // of 16 dims; addresses count 16 bytes
    multiply_keys<true>(scores, queries + step / 4 * 512 + step % 4 * 2, keys + step / 4 * 64 + step % 4 * 2);
  commit_wgmma();
}

// Begin to add a tile's values, with the weights of its keys.
__device__ inline void begin_values(float (&attended)[64], const unsigned (&weights)[32], int turn,
                                    PromptShared& shared) {
  const int slot = turn % kPipelineTiles;
  wait(shared.full[kValues][slot], turn / kPipelineTiles % 2);
  const unsigned long long values = describe_cells(shared.tiles[kValues][slot]);
  fence_wgmma();
#pragma unroll
  for (int step = 0; step < 8; step++)  // of 16 keys
    add_values(attended, weights + step * 4, values + step * 256);
  commit_wgmma();
}

__device__ inline void release(Kind kind, int turn, PromptShared& shared) {
  if (threadIdx.x % 32 == 0) arrive(shared.empty[kind][turn % kPipelineTiles]);
}

// Attend to all of an item's keys.
template <class S>
__device__ inline void attend_keys(const PromptArgs& args, const PromptItem& item, const PromptPlace<S>& at,
                                   float (&attended)[64], PromptSums& sums, PromptShared& shared) {
  const int tiles = count_tiles(item);
  float scores[64];
  unsigned weights[32];
  if (at.group == 1) give_turn(0);
  wait_for_turn(at.group);
  begin_scores(scores, 0, shared);
  give_turn(1 - at.group);
  clear_values_behind(item, shared);
  wait_for_wgmma<0>();
  keep(scores);
  release(kKeys, 0, shared);
  weigh(scores, sums, at.keys, first_of(item, 0), args.scale);
  round_weights(scores, weights);
#pragma unroll 1
  for (int turn = 1; turn < tiles; turn++) {
    wait_for_turn(at.group);
    begin_scores(scores, turn, shared);
    begin_values(attended, weights, turn - 1, shared);
    give_turn(1 - at.group);
    wait_for_wgmma<1>();
    keep(scores);
    release(kKeys, turn, shared);
    const float2 shrink = weigh(scores, sums, at.keys, first_of(item, turn), args.scale);
    compute_before(sums.total[0] + sums.total[1], shared.is_last);
    wait_for_wgmma<0>();
    keep(attended);
    release(kValues, turn - 1, shared);
#pragma unroll
    for (int i = 0; i < 64; i++) attended[i] *= i / 2 % 2 ? shrink.y : shrink.x;
    round_weights(scores, weights);
  }
  begin_values(attended, weights, tiles - 1, shared);
  wait_for_wgmma<0>();
  keep(attended);
}

template <class S>
__device__ inline void attend_item(const PromptArgs& args, const PromptItem& item, int head, PromptShared& shared) {
  const PromptPlace<S> at(item);
  float attended[64] = {};
  PromptSums sums;
  if (count_tiles(item) > 0) {
    load_queries<S>(args, item, head, shared);
    attend_keys<S>(args, item, at, attended, sums, shared);
  }
  write_sums<S>(args, item, head, at, attended, sums);
  combine_if_last<S>(args, item, head, shared.is_last);
}

template <int kGroup, int kKvHeads, int kBlockSize>
__global__ void __launch_bounds__(kTileThreads + 128, 1) attend_prompts(const __grid_constant__ PromptArgs args) {
  using S = PromptShape<kGroup, kKvHeads, kBlockSize>;
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<PromptShared*>(memory);
  const int head = blockIdx.x;
  if (threadIdx.x == 0) {
    for (int kind = 0; kind < 2; kind++)
      for (int slot = 0; slot < kPipelineTiles; slot++)
        initialize(shared.full[kind][slot], 1), initialize(shared.empty[kind][slot], kTileThreads / 32);
    publish_barriers();
    prefetch_map(args.cells);
  }
  __syncthreads();
  wait_for_prerequisites();
  const PromptItem item = load_item(args.items + blockIdx.y * kItemWords);
  if (item.num_queries == 0) return;
  if (threadIdx.x >= kTileThreads) {
    give_registers<24>();
    if (threadIdx.x < kTileThreads + 32) copy_tiles<S>(args, item, head, shared);
  } else {
    take_registers<240>();
    attend_item<S>(args, item, head, shared);
  }
}

}  // namespace blink
