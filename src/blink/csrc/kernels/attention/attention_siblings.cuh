// SPDX-License-Identifier: Apache-2.0
// Rows that verify drafts. Each is a row of its own, of the same text at the next position, and attends to the rows
// before it: its siblings. What they write to the cache may not be there yet, for one kernel writes and reads. So a row
// computes its siblings' keys and values itself, from the same QKV projection: the same bits.
#pragma once

#include "kernels/attention/attention_heads.cuh"
#include "region/layout.h"

namespace blink {

constexpr int kSiblingsAtOnce = 4;  // whose loads are under way together

// How many of the rows before a row are of its text, at the positions before its own. A warp finds out.
__device__ inline int count_siblings(const AttentionArgs& args, int row, int lane) {
  static_assert(kMaxDrafts < 32);
  const int other = row - 1 - lane;
  const bool is_sibling = lane < int(kMaxDrafts) && other >= 0 && args.row_slots[other] == args.row_slots[row] &&
                          args.context_lens[other] == args.context_lens[row] - 1 - lane;
  return __ffs(~__ballot_sync(~0u, is_sibling)) - 1;
}

// Where a lane's part of a key (0) or value (1) is in a tile.
template <class S>
__device__ inline typename S::Cell* part_of(Tile<S>& tile, int kind, int key, int lane) {
  const int part = lane * S::dims;
  return reinterpret_cast<typename S::Cell*>(tile.chunk(kind, key, part / S::chunk)) + part % S::chunk;
}

// Put keys first .. end of siblings, in the text, in their places of a tile that begins with key `begin`. A warp does.
template <class S>
__device__ inline void put_siblings(const AttentionArgs& args, const Place<S>& at, int begin, int first, int end,
                                    Tile<S>& tile) {
  constexpr int width = (S::group + 2) * S::token;
  unsigned keys[kSiblingsAtOnce][S::dims / 2], values[kSiblingsAtOnce][S::dims / 2];
  Angles<S> angles[kSiblingsAtOnce];
#pragma unroll
  for (int i = 0; i < kSiblingsAtOnce; i++) {
    const int row = at.row - (at.length - 1 - min(first + i, end - 1));
    const Bf16* qkv = args.qkv + long(row) * width + (S::group * S::kv_heads + at.head) * S::head_dim;
    load_head<S>(qkv, at.lane, keys[i]);
    load_head<S>(qkv + S::token, at.lane, values[i]);
    angles[i] = load_angles<S>(args, row, at.lane);
  }
#pragma unroll
  for (int i = 0; i < kSiblingsAtOnce; i++) {
    const int key = first + i - begin;
    if (first + i >= end) break;
    prepare_head<S>(args.key_norm, args.eps, angles[i], at.lane, keys[i]);
    keep_cell<S>(keys[i], args.key_rate, part_of(tile, 0, key, at.lane), nullptr);
    keep_cell<S>(values[i], args.value_rate, part_of(tile, 1, key, at.lane), nullptr);
  }
}

// Complete a tile, which begins with key `begin`, with what siblings have in it.
template <class S>
__device__ inline void complete_siblings(const AttentionArgs& args, const Place<S>& at, int num_siblings, int begin,
                                         Tile<S>& tile) {
  const int start = max(at.length - 1 - num_siblings, begin), end = min(at.length - 1, begin + kTileKeys);
  if (start >= end) return;
#pragma unroll 1
  for (int first = start; first < end; first += kSiblingsAtOnce) put_siblings(args, at, begin, first, end, tile);
  publish_stores();  // before the next copy to this place
  __syncwarp();
}

}  // namespace blink
