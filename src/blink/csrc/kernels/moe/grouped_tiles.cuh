// SPDX-License-Identifier: Apache-2.0
// Which tiles of all experts' weights a block of grouped_gemm.cuh multiplies. Each expert's first tiles are homes, one
// of each block as far as blocks go round. A block copies its home before it is known whether a row chose the expert.
// All other tiles are shared out so that each block has as many in the end.
#pragma once

#include "kernels/common/ptx.cuh"

namespace blink {

constexpr int kMaxExperts = 256, kMaxChunks = 512;  // what grouped_gemm.py keeps to

struct Chunk {                                 // rows of one expert that are multiplied together
  unsigned short expert, first, count, homes;  // the last: of its tiles, at its beginning
};

struct GroupedTile {
  Chunk chunk;
  int index;  // in the expert's weight

  // Tiles start at different stages of k: those that go through it in step want the same memory channels at the same
  // time. Where, hangs on the weights alone, so that a row's sums do not hang on other rows.
  __device__ int stage(int turn, int stages) const { return ((chunk.expert + index) * 7 + turn) % stages; }
};

struct GroupedWork {
  Chunk home;        // the block's; no rows: it has none, or nobody chose the expert
  int chunk, index;  // where the block's other tiles begin
  int num_tiles;     // with its home
};

struct GroupedList {
  Chunk chunks[kMaxChunks];
  GroupedWork work;
};

// Goes through a block's tiles.
class GroupedTiles {
 public:
  __device__ GroupedTiles(const GroupedList& list, int per_expert)
      : list_(list), per_expert_(per_expert), left_(list.work.num_tiles), at_home_(list.work.home.count > 0) {
    if (at_home_)
      tile_ = {list.work.home, int(blockIdx.x) % list.work.home.homes};
    else
      begin_others();
  }

  __device__ bool done() const { return left_ == 0; }
  __device__ const GroupedTile& operator*() const { return tile_; }

  __device__ void next() {
    if (--left_ == 0) return;
    if (at_home_) {
      at_home_ = false;
      begin_others();
      return;
    }
    tile_.index++;
    while (tile_.index == per_expert_) {
      tile_.chunk = list_.chunks[++number_];
      tile_.index = tile_.chunk.homes;
    }
  }

 private:
  __device__ void begin_others() {
    number_ = list_.work.chunk;
    tile_ = {list_.chunks[number_], list_.work.index};
  }

  const GroupedList& list_;
  const int per_expert_;
  int left_, number_ = 0;
  bool at_home_;
  GroupedTile tile_;
};

// Add up the lanes' numbers up to this one.
__device__ inline int scan_lanes(int value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, value, step);
    if (int(threadIdx.x % 32) >= step) value += other;
  }
  return value;
}

// List what is multiplied, of experts that so many rows chose, and what of it by this block, by one warp. homes: of
// each expert.
template <int kTokens>
__device__ inline void list_chunks(const int* rows, int experts, int per_expert, int homes, GroupedList& list) {
  constexpr int most = kMaxExperts / 32;
  const int lane = threadIdx.x % 32, own = (experts + 31) / 32;  // experts of a lane
  const int home = homes ? min(int(blockIdx.x) / homes, experts) : experts;
  int counts[most], home_rows = home < experts ? rows[home] : 0;
#pragma unroll
  for (int i = 0; i < most; i++) {
    const int expert = lane * own + i;
    counts[i] = i < own && expert < experts ? rows[expert] : 0;
  }
  int own_chunks = 0, own_chosen = 0, chosen_before = 0;  // the last: experts before the home's
#pragma unroll
  for (int i = 0; i < most; i++) {
    own_chunks += (counts[i] + kTokens - 1) / kTokens, own_chosen += counts[i] > 0;
    chosen_before += counts[i] > 0 && lane * own + i < home;
  }
  const int both = scan_lanes(own_chunks | own_chosen << 16);
  int chunk = (both & 0xffff) - own_chunks, chosen = (both >> 16) - own_chosen;
  const long tiles = long(__shfl_sync(~0u, both, 31) & 0xffff) * per_expert;
  if (tiles < gridDim.x) homes = home_rows = 0;  // a home would be more than a block's share
  const int is_chosen = home_rows > 0;
  const int homes_before = __reduce_add_sync(~0u, chosen_before) * homes + (is_chosen ? blockIdx.x % homes : 0);
  const int begin = tiles * blockIdx.x / gridDim.x, end = tiles * (blockIdx.x + 1) / gridDim.x;
  if (lane == 0) {
    const auto count = static_cast<unsigned short>(min(kTokens, home_rows));
    list.work = {{static_cast<unsigned short>(home), 0, count, static_cast<unsigned short>(homes)}, 0, 0, end - begin};
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < most; i++)
    for (int first = 0; first < counts[i]; first += kTokens, chunk++) {
      const int skipped = first == 0 ? homes : 0;
      const int index = begin - homes_before - (chunk * per_expert - homes * chosen) + skipped;
      if (index >= skipped && index < per_expert) list.work.chunk = chunk, list.work.index = index;
      list.chunks[chunk] = {static_cast<unsigned short>(lane * own + i), static_cast<unsigned short>(first),
                            static_cast<unsigned short>(min(kTokens, counts[i] - first)),
                            static_cast<unsigned short>(skipped)};
      chosen += first == 0;
    }
}

}  // namespace blink
