// SPDX-License-Identifier: Apache-2.0
// What the parts of decoding rows' attention share: arguments, sizes, shared memory, and where a warp works.
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

}  // namespace blink
