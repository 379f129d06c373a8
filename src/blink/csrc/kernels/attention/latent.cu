// SPDX-License-Identifier: Apache-2.0
// Latent attention (MLA) over the paged cache, on Hopper. A block takes up to 64 pairs of query and query head, and one
// chunk of their keys, the last ones first. What a token keeps is read once: all of it is a key, and its latent is the
// value too. Each of two warpgroups computes the scores and half of the values' dims; a third one copies tokens ahead.
#include "kernels/prefill/results.cuh"

namespace blink {

constexpr int kLatentPairs = 64;  // of query and query head
constexpr int kLatentKeys = 64;   // keys of one turn
constexpr int kLatentSlots = 2;   // of the pipeline, with the keys of a turn each
constexpr int kLatentRank = 512, kLatentRope = 64;
constexpr int kLatentDims = kLatentRank / 2;                       // of values, of a warpgroup
constexpr int kLatentParts = (kLatentRank + kLatentRope) / 64;     // of 64 dims, 128 bytes
constexpr int kLatentGroupBytes = kLatentParts * 1024;             // of eight keys
constexpr int kLatentBytes = kLatentKeys / 8 * kLatentGroupBytes;  // of a turn's keys
constexpr int kLatentQueryBytes = kLatentParts * kLatentPairs * 128;

// kKvHeads: groups of query heads, which share one vector of each token.
template <int kGroup, int kKvHeads, int kBlockSize>
struct LatentShape {
  static constexpr int group = kGroup, kv_heads = kKvHeads, block_size = kBlockSize;
  static constexpr int pairs = kLatentPairs, width = kLatentRank;  // of a block; of a result
  static constexpr int blocks = kLatentKeys / kBlockSize;          // of the cache, in a turn
  static_assert(kBlockSize % 8 == 0 && kLatentKeys % kBlockSize == 0 && kGroup <= kLatentPairs);
};

struct LatentShared {
  alignas(1024) char queries[kLatentQueryBytes];         // parts of 64 rows of 128 bytes
  alignas(1024) char tiles[kLatentSlots][kLatentBytes];  // of each eight keys, parts of eight rows of 128 bytes
  alignas(8) Barrier full[kLatentSlots], empty[kLatentSlots];
  int is_last;
};

__device__ inline int count_turns(const PromptItem& item) {
  return max(item.end_key - item.first_key + kLatentKeys - 1, 0) / kLatentKeys;
}

// The first key of a turn: the last keys, which some queries may not see, come first.
__device__ inline int first_key_of(const PromptItem& item, int turn) {
  return item.first_key + (count_turns(item) - 1 - turn) * kLatentKeys;
}

// The descriptor of a turn's keys, which are columns of scores; or rows behind one another of columns, which dims are.
__device__ inline unsigned long long describe_latents(const void* tile) {
  constexpr unsigned long long part = 1024 >> 4, keys = kLatentGroupBytes >> 4;
  return (unsigned long long)(shared_address(tile) >> 4) | part << 16 | keys << 32 | 1ull << 62;
}

// What the copying warp does: the cache's blocks of each turn, one for each of the first lanes.
template <class S>
__device__ inline void copy_latents(const PromptArgs& args, const PromptItem& item, LatentShared& shared) {
  constexpr int bytes = S::block_size / 8 * kLatentGroupBytes;
  const int turns = count_turns(item), lane = threadIdx.x % 32;
  const int* table = args.block_tables + long(item.row_slot) * args.table_stride;
  const auto find_block = [&](int turn) {
    const int place = first_key_of(item, turn) / S::block_size + lane;
    return turn < turns && lane < S::blocks && place * S::block_size < item.end_key ? table[place] : 0;
  };
  int block = find_block(0);
  for (int turn = 0; turn < turns; turn++) {
    const int next = find_block(turn + 1), slot = turn % kLatentSlots;
    const int keys = min(item.end_key - first_key_of(item, turn), kLatentKeys);
    const int blocks = (keys + S::block_size - 1) / S::block_size;
    if (turn >= kLatentSlots) wait(shared.empty[slot], (turn / kLatentSlots - 1) % 2);
    if (lane == 0) expect(shared.full[slot], blocks * bytes);
    __syncwarp();
    if (lane < blocks)
      copy_box_5d(shared.tiles[slot] + lane * bytes, args.cells, 0, block * (S::block_size / 8), 0, shared.full[slot]);
    block = next;
  }
}

// Bring the block's queries to shared memory, as boxes; those that there are not are zeros.
template <class S>
__device__ inline void load_pairs(const PromptArgs& args, const PromptItem& item, int head, LatentShared& shared) {
  constexpr int chunks = kLatentParts * 8;  // of 16 bytes
  for (int i = threadIdx.x; i < kLatentPairs * chunks; i += kTileThreads) {
    const int pair = i / chunks, chunk = i % chunks;
    const bool inside = pair < item.num_queries * S::group;
    const Bf16* from = args.query + row_of_pair<S>(item, head, pair) * (kLatentParts * 64) + chunk * 8;
    char* to = shared.queries + chunk / 8 * (kLatentPairs * 128) + pair * 128 + (chunk % 8 ^ pair % 8) * 16;
    *reinterpret_cast<Vec16*>(to) = inside ? load(from) : Vec16{};
  }
}

// Latents behind the last key, whatever they are, become zeros: as values they are multiplied by 0.
__device__ inline void clear_latents_behind(const PromptItem& item, LatentShared& shared) {
  const int keys = item.end_key - first_key_of(item, 0);
  if (keys >= kLatentKeys) return;
  for (int i = threadIdx.x; i < (kLatentKeys - keys) * kLatentParts * 8; i += kTileThreads) {
    const int key = keys + i / (kLatentParts * 8), chunk = i % (kLatentParts * 8);
    char* row = shared.tiles[0] + key / 8 * kLatentGroupBytes + chunk / 8 * 1024 + key % 8 * 128;
    reinterpret_cast<Vec16*>(row)[chunk % 8] = {};
  }
}

// Where a thread's rows of the sums stand: row 0 and 1 are pairs eight apart, the same of both warpgroups.
struct LatentPlace {
  int group, warp, lane;  // the warpgroup, the warp within it
  LastKeys keys;

  __device__ LatentPlace(const PromptItem& item, int heads) {
    group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    for (int row = 0; row < 2; row++) keys.of[row] = last_key(item, pair(row) / heads);
    keys.least = last_key(item, 0);
  }

  __device__ int pair(int row) const { return warp * 16 + row * 8 + lane / 4; }
};

// The scores of all pairs with a turn's keys.
__device__ inline void score_keys(float (&scores)[32], int slot, LatentShared& shared) {
  const unsigned long long queries = describe_box(shared.queries), keys = describe_latents(shared.tiles[slot]);
#pragma unroll
  for (int i = 0; i < 32; i++) scores[i] = 0;
  fence_wgmma();
#pragma unroll
  for (int step = 0; step < kLatentParts * 4; step++)  // of 16 dims; addresses count 16 bytes
    multiply_boxes(scores, queries + step / 4 * (kLatentPairs * 8) + step % 4 * 2, keys + step / 4 * 64 + step % 4 * 2);
  commit_wgmma();
  wait_for_wgmma<0>();
  keep(scores);
}

// Add a turn's latents, as values, with the weights of its keys.
__device__ inline void add_latents(float (&attended)[128], const unsigned (&weights)[16], int slot, int group,
                                   LatentShared& shared) {
  const unsigned long long values = describe_latents(shared.tiles[slot]) + group * (kLatentDims / 64 * 64);
  fence_wgmma();
#pragma unroll
  for (int step = 0; step < kLatentKeys / 16; step++)
    add_values(attended, weights + step * 4, values + step * (2 * kLatentGroupBytes >> 4));
  commit_wgmma();
  wait_for_wgmma<0>();
  keep(attended);
}

// Attend to all of an item's keys.
__device__ inline void attend_turns(const PromptArgs& args, const PromptItem& item, const LatentPlace& at,
                                    float (&attended)[128], PromptSums& sums, LatentShared& shared) {
  float scores[32];
  unsigned weights[16];
  const int turns = count_turns(item);
#pragma unroll 1
  for (int turn = 0; turn < turns; turn++) {
    const int slot = turn % kLatentSlots;
    wait(shared.full[slot], turn / kLatentSlots % 2);
    if (turn == 0) {
      clear_latents_behind(item, shared);
      publish_stores();
      sync_multiplying();
    }
    score_keys(scores, slot, shared);
    const float2 shrink = weigh(scores, sums, at.keys, first_key_of(item, turn), args.scale);
#pragma unroll
    for (int i = 0; i < 128; i++) attended[i] *= i / 2 % 2 ? shrink.y : shrink.x;
    round_weights(scores, weights);
    add_latents(attended, weights, slot, at.group, shared);
    if (at.lane == 0) arrive(shared.empty[slot]);
  }
}

template <class S>
__device__ inline void attend_pairs(const PromptArgs& args, const PromptItem& item, int head, LatentShared& shared) {
  const LatentPlace at(item, S::group);
  float attended[128] = {};
  PromptSums sums;
  if (count_turns(item) > 0) {
    load_pairs<S>(args, item, head, shared);
    attend_turns(args, item, at, attended, sums, shared);
  }
  write_sums<S>(args, item, head, at, attended, sums, at.group * kLatentDims);
  combine_if_last<S>(args, item, head, shared.is_last);
}

template <int kGroup, int kKvHeads, int kBlockSize>
__global__ void __launch_bounds__(kTileThreads + 128, 1) attend_latents(const __grid_constant__ PromptArgs args) {
  using S = LatentShape<kGroup, kKvHeads, kBlockSize>;
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<LatentShared*>(memory);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kLatentSlots; slot++)
      initialize(shared.full[slot], 1), initialize(shared.empty[slot], kTileThreads / 32);
    publish_barriers();
    prefetch_map(args.cells);
  }
  __syncthreads();
  wait_for_prerequisites();
  const PromptItem item = load_item(args.items + blockIdx.y * kItemWords);
  if (item.num_queries == 0) return;
  if (threadIdx.x >= kTileThreads) {
    give_registers<24>();
    if (threadIdx.x < kTileThreads + 32) copy_latents<S>(args, item, shared);
  } else {
    take_registers<240>();
    attend_pairs<S>(args, item, blockIdx.x, shared);
  }
}

}  // namespace blink
