// SPDX-License-Identifier: Apache-2.0
// What the parts of decoding rows' attention share: sizes, shared memory, and where a warp works.
#pragma once

#include "kernels/args.h"
#include "kernels/common/quantized.cuh"
#include "kernels/common/tensor_copy.cuh"

namespace blink {

// An element of the cache.
template <bool kFp8>
struct CellOf {
  using Type = Bf16;
};
template <>
struct CellOf<true> {
  using Type = unsigned char;
};

constexpr int kTileKeys = 16;      // keys that a warp takes at once, all in one block of the cache
constexpr float kLowest = -1e30f;  // below every score, and finite: differences are never NaN

template <int kGroup_, int kHeadDim_, int kRotaryDim_, int kKvHeads_, int kBlockSize_, int kCluster_, int kWarps_,
          int kStages_, bool kNorm_, bool kFp8_>
struct AttentionShape {
  static constexpr int group = kGroup_;  // query heads per KV head, up to 8
  static constexpr int head_dim = kHeadDim_;
  static constexpr int rotary_dim = kRotaryDim_;
  static constexpr int kv_heads = kKvHeads_;
  static constexpr int block_size = kBlockSize_;
  static constexpr int cluster = kCluster_;
  static constexpr int warps = kWarps_;
  static constexpr int stages = kStages_;  // tiles of a warp that are copied or worked on
  static constexpr bool norm = kNorm_;
  static constexpr bool fp8 = kFp8_;  // the cache's type
  using Cell = typename CellOf<fp8>::Type;
  static constexpr int chunk = 16 / sizeof(Cell);  // elements of 16 bytes
  static constexpr int chunks = head_dim / chunk;  // in a key or value
  static constexpr int steps = chunks / 4;         // 16-byte loads of a key by each of its four lanes
  static constexpr int parts = head_dim * sizeof(Cell) > 128 ? head_dim / kBoxRow : 1;  // of a head in a box
  static constexpr int box_row = head_dim / parts;                                      // elements
  static constexpr int dims = head_dim / 32;         // of each lane, where a warp holds one head
  static constexpr int token = kv_heads * head_dim;  // elements between tokens of the cache
  static constexpr int outputs = group * head_dim, share = (outputs / 4 + cluster - 1) / cluster * 4;  // of a block
  static_assert(group <= 8 && dims % 2 == 0 && rotary_dim / 2 % dims == 0 && rotary_dim <= head_dim);
  static_assert(block_size % kTileKeys == 0 && head_dim % kBoxRow == 0 && stages <= 32);
  // What warps leave in place of their tiles must fit there.
  static_assert(2 * kTileKeys * head_dim * sizeof(Cell) * stages >= group * (head_dim + 4) * sizeof(float));
};

template <class S>
struct Tile {  // as the tensor copy leaves it: keys, then values
  typename S::Cell boxes[2][S::parts][kTileKeys][S::box_row];

  // A 16-byte chunk of a key (0) or value (1). Rows of 64 bytes are swizzled by pairs.
  __device__ Vec16* chunk(int kind, int key, int chunk) {
    constexpr int in_row = S::box_row / S::chunk;
    const int place = chunk % in_row ^ (in_row == 8 ? key : key / 2) % in_row;
    return reinterpret_cast<Vec16*>(boxes[kind][chunk / in_row][key] + place * S::chunk);
  }
};

template <class S>
struct AttentionShared {
  union {
    Tile<S> pipeline[S::warps][S::stages];
    float parts[S::warps][sizeof(Tile<S>) * S::stages / 4];  // [group, head_dim + 4] of each warp, once it has no tile
  };
  alignas(16) Bf16 queries[S::group][S::head_dim + 32];  // padded against bank conflicts; with FP8 f16
  alignas(16) typename S::Cell new_key[S::head_dim];
  alignas(16) typename S::Cell new_value[S::head_dim];
  float best[S::warps][S::group], total[S::warps][S::group];
  // From each block of the cluster, for the outputs that this one writes.
  alignas(16) float from_part[S::cluster][S::share];
  float from_best[S::cluster][S::group], from_total[S::cluster][S::group];
  alignas(8) Barrier full[S::warps][S::stages], exchanged;
};

// Where one row's attention happens.
template <class S>
struct Place {
  int row, head, rank, warp, lane;
  int length;        // keys, the new one included
  int first, count;  // this warp's tiles: every S::cluster * S::warps-th
  const int* table;  // the row's blocks

  __device__ int tile(int turn) const { return first + turn * S::cluster * S::warps; }
  __device__ int num_tiles() const { return (length + kTileKeys - 1) / kTileKeys; }
  // Whether the newest key is in one of this block's tiles.
  __device__ bool owns_newest() const { return length > 0 && (num_tiles() - 1) % S::cluster == rank; }
};

template <class S>
__device__ inline Place<S> find_place(const AttentionArgs& args, int row, int head, int rank) {
  Place<S> at;
  at.row = row;
  at.head = head;
  at.rank = rank;
  at.warp = threadIdx.x / 32;
  at.lane = threadIdx.x % 32;
  at.length = args.context_lens[row];
  at.table = args.block_tables + long(args.row_slots[row]) * args.table_stride;
  at.first = at.warp * S::cluster + rank;
  at.count = max(at.num_tiles() - at.first + S::cluster * S::warps - 1, 0) / (S::cluster * S::warps);
  return at;
}

}  // namespace blink
