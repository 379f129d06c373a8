// SPDX-License-Identifier: Apache-2.0
// What the parts of prompts' attention share: sizes, shared memory and tiles.
#pragma once

#include "kernels/args.h"
#include "kernels/prefill/warpgroups.cuh"

namespace blink {

// One chunk of a tile's keys: kernels/gpu/attention/plan.py's words.
struct PromptItem {
  int first_token, num_queries, first_position, first_key, end_key, row_slot, partial, first_partial, num_chunks;
};

constexpr int kItemWords = 16;
constexpr int kHeadDim = 128;
constexpr int kTilePairs = 128;    // of query and query head; 64 for each of two warpgroups
constexpr int kTileKeys = 128;     // keys of one turn
constexpr int kTileThreads = 256;  // that multiply
constexpr int kCellBytes = kHeadDim * 2;
constexpr int kTileBytes = kTileKeys * kCellBytes;
constexpr int kPipelineTiles = 2;  // of keys, and as many of values

template <int kGroup, int kKvHeads, int kBlockSize>
struct PromptShape {
  static constexpr int group = kGroup, kv_heads = kKvHeads, block_size = kBlockSize;
  static constexpr int pairs = kTilePairs, width = kHeadDim;  // of a tile; of a result
  static constexpr int blocks = kTileKeys / kBlockSize;       // of the cache, in a tile
  static_assert(kBlockSize % 8 == 0 && kTileKeys % kBlockSize == 0 && kGroup <= kTilePairs);
};

// Boxes as the tensor copy leaves them: of each eight keys two halves of 64 dims, eight rows of 128 bytes each.
struct PromptShared {
  alignas(1024) char queries[2][64 * kCellBytes];           // of each warpgroup; halves of 64 rows
  alignas(1024) char tiles[2][kPipelineTiles][kTileBytes];  // of keys, of values
  alignas(8) Barrier full[2][kPipelineTiles], empty[2][kPipelineTiles];
  int is_last;
};

enum Kind { kKeys, kValues };

__device__ inline PromptItem load_item(const int* words) {
  const Vec16 first = load(words), second = load(words + 4);
  return {int(first.x),  int(first.y),  int(first.z),
          int(first.w),  int(second.x), int(second.y),
          int(second.z), int(second.w), int(load_word(words + 8))};
}

__device__ inline int count_tiles(const PromptItem& item) {
  return max(item.end_key - item.first_key + kTileKeys - 1, 0) / kTileKeys;
}

// The first key of a turn's tile: the last tile, which some queries see in part, comes first.
__device__ inline int first_of(const PromptItem& item, int turn) {
  return item.first_key + (count_tiles(item) - 1 - turn) * kTileKeys;
}

// The descriptor of a tile of the cache: eight keys are 2,048 bytes from the next eight, halves of dims 1,024 apart. To
// scores, keys are columns, whose dims are neighbours; to what is attended, dims are columns, of which 64 are.
__device__ inline unsigned long long describe_cells(const void* tile) {
  return (unsigned long long)(shared_address(tile) >> 4) | 64ull << 16 | 128ull << 32 | 1ull << 62;
}

}  // namespace blink
