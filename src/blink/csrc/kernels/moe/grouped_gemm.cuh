// SPDX-License-Identifier: Apache-2.0
// GEMMs of up to 256 rows with the experts that they chose. What rows an expert treats lie behind one
// another, from places * expert on; so many of them as a tile has tokens are multiplied together. Blocks stay: each
// takes its share of all tiles, and one warp copies the tiles' weights to a pipeline of stages that does not run dry in
// between. While the router still chooses, blocks of the gates' GEMM copy what is likely to be chosen.
//
// Prompts take Triton's grouped GEMM: many of their tokens choose the same experts, and here one block copies all rows
// of an expert. Multicast of activations gained nothing: L2 is not what the SMs wait for.
#pragma once

#include "kernels/args.h"
#include "kernels/common/hi_lo.cuh"
#include "kernels/common/wgmma_hi_lo.cuh"
#include "kernels/moe/grouped_tiles.cuh"

namespace blink {

// Sizes. kGroups warpgroups take 64 weight rows each; a stage has kBoxes boxes of 128 bytes of each weight row.
template <bool kHiLoActivations, int kTokens, int kGroups, int kBoxes, int kStages, Output kOutput>
struct GroupedShape {
  static constexpr bool hi_lo = kHiLoActivations;  // FP8 weights, and hi/lo FP8 of activations
  static constexpr int tokens = kTokens, boxes = kBoxes, stages = kStages;
  static constexpr Output output = kOutput;
  static constexpr int warps = 4 * kGroups, threads = 32 * warps;  // that multiply
  static constexpr int tile = 64 * kGroups, halves = kOutput == Output::kGate ? 2 : 1, outputs = tile / halves;
  static constexpr int pairs = outputs / 2, turns = tokens * pairs / threads;  // of outputs that a thread writes
  static constexpr int box_k = hi_lo ? 128 : 64, columns = hi_lo ? kHiLo * tokens : tokens;
  static constexpr int weight_box = tile * 128, token_box = columns * 128;  // bytes
  static constexpr int stage = (weight_box + token_box) * boxes;
  static_assert(output != Output::kAdd && threads % pairs == 0 && tokens * pairs % threads == 0);
};

template <class S>
struct GroupedShared {
  alignas(1024) char pipeline[S::stages][S::stage];
  float sums[2][S::tokens][S::tile + 4];  // of a tile and the one before; padded against conflicts
  GroupedList list;
  alignas(8) Barrier full[S::stages], empty[S::stages];
};

template <class S>
__device__ inline void copy_weights(const GroupedArgs& args, const GroupedTile& tile, int stage, int turn,
                                    GroupedShared<S>& shared) {
  const int slot = turn % S::stages;
  announce(shared.full[slot], S::weight_box * S::boxes);
  copy_box_4d(shared.pipeline[slot], args.weight, tile.index * S::outputs, tile.chunk.expert * S::halves,
              stage * S::boxes, shared.full[slot], read_once_policy());
}

template <class S>
__device__ inline void copy_rows(const GroupedArgs& args, const GroupedTile& tile, int stage, int turn,
                                 GroupedShared<S>& shared) {
  const int slot = turn % S::stages, row = tile.chunk.expert * args.places + tile.chunk.first;
  expect(shared.full[slot], S::token_box * S::boxes);
  copy_box_4d(shared.pipeline[slot] + S::weight_box * S::boxes, args.x, row, 0, stage * S::boxes, shared.full[slot],
              read_often_policy());
}

// Begin to copy the block's home, so many stages of it; homes: of each expert.
template <class S>
__device__ inline void copy_home(const GroupedArgs& args, int homes, int guessed, GroupedShared<S>& shared) {
  const GroupedTile tile = {{static_cast<unsigned short>(blockIdx.x / homes)}, int(blockIdx.x) % homes};
  for (int turn = 0; turn < guessed; turn++) copy_weights<S>(args, tile, tile.stage(turn, args.stages), turn, shared);
}

// What the copying thread does: fill the pipeline with weights, and from the wait on with rows, too. ahead: stages of
// the first tile that have their weights.
template <class S>
__device__ inline void copy_tiles(const GroupedArgs& args, int turn, int ahead, GroupedShared<S>& shared) {
  GroupedTiles tiles(shared.list, args.n / S::outputs);
  if constexpr (S::output != Output::kGate)
    for (GroupedTiles first = tiles; ahead < S::stages && !first.done(); first.next())
      for (int i = 0; i < args.stages && ahead < S::stages; i++, ahead++)
        copy_weights<S>(args, *first, (*first).stage(i, args.stages), ahead, shared);
  wait_for_prerequisites();
  for (; !tiles.done(); tiles.next()) {
    for (int i = 0; i < args.stages; i++, turn++) {
      const int stage = (*tiles).stage(i, args.stages);
      if (turn >= S::stages) wait(shared.empty[turn % S::stages], (turn / S::stages - 1) % 2);
      if (turn >= ahead) copy_weights<S>(args, *tiles, stage, turn, shared);
      copy_rows<S>(args, *tiles, stage, turn, shared);
    }
  }
}

// Multiply a stage: the sums of 64 weight rows, as multiply_boxes() has them.
template <class S>
__device__ inline void multiply_stage(const char* stage, float (&sums)[S::tokens / 2]) {
  const unsigned long long weights = describe_box(stage + threadIdx.x / 128 * 8192);
  const unsigned long long rows = describe_box(stage + S::weight_box * S::boxes);
  [[maybe_unused]] float parts[S::columns / 2];
  fence_wgmma();
#pragma unroll
  for (int step = 0; step < 4 * S::boxes; step++) {
    const int box = step / 4, in_box = step % 4 * 2;  // boxes' addresses count 16 bytes
    const unsigned long long a = weights + box * S::weight_box / 16 + in_box,
                             b = rows + box * S::token_box / 16 + in_box;
    if constexpr (!S::hi_lo)
      multiply_boxes(sums, a, b);
    else if (step == 0)
      multiply_hi_lo<false>(parts, a, b);
    else
      multiply_hi_lo<true>(parts, a, b);
  }
  commit_wgmma();
  wait_for_wgmma<0>();
  if constexpr (S::hi_lo) {
    constexpr int count = S::tokens / 2;
    keep(parts);
#pragma unroll
    for (int i = 0; i < count; i++)  // first the hi halves, then the lo
      sums[i] += join_hi_lo(parts[i], parts[i + count]);
  }
}

// What a thread needs for its outputs of a tile, loaded while the tile is multiplied.
template <class S>
struct GroupedAddresses {
  long places[S::turns];  // where it writes; -1: nowhere
  float scales[S::halves][2];
};

template <class S>
__device__ inline GroupedAddresses<S> find_addresses(const GroupedArgs& args, const GroupedTile& tile) {
  GroupedAddresses<S> found;
  const int output = tile.index * S::outputs + threadIdx.x % S::pairs * 2;
#pragma unroll
  for (int i = 0; i < S::turns; i++) {
    const int token = (i * S::threads + int(threadIdx.x)) / S::pairs;
    const long row = long(tile.chunk.expert) * args.places + tile.chunk.first + token;
    found.places[i] = -1;
    if (token < tile.chunk.count)
      found.places[i] = (S::output == Output::kGate ? row : args.pairs[row]) * args.n + output;
  }
  if constexpr (S::hi_lo) {
    const float* scales = args.scales + long(tile.chunk.expert) * S::halves * args.n + output;
#pragma unroll
    for (int half = 0; half < S::halves; half++)
      for (int i = 0; i < 2; i++) found.scales[half][i] = scales[half * args.n + i] * kHiLoDivisor;
  }
  return found;
}

template <class S>
__device__ inline void write_tile(const GroupedArgs& args, const float (&sums)[S::tokens][S::tile + 4],
                                  const GroupedAddresses<S>& at) {
  const int in_tile = threadIdx.x % S::pairs * 2;
#pragma unroll
  for (int i = 0; i < S::turns; i++) {
    const int token = (i * S::threads + int(threadIdx.x)) / S::pairs;
    if (at.places[i] < 0) continue;
    float values[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      values[j] = sums[token][in_tile + j] * (S::hi_lo ? at.scales[0][j] : 1);
      if constexpr (S::output == Output::kGate) {
        const float up = sums[token][in_tile + S::outputs + j] * (S::hi_lo ? at.scales[1][j] : 1);
        values[j] = silu(values[j]) * up;
      }
    }
    const unsigned pair = to_bf16_pair(values[0], values[1]);
    if constexpr (S::hi_lo && S::output == Output::kGate)
      write_hi_lo(args.out, long(args.experts) * args.places * args.n, at.places[i], pair);
    else
      *reinterpret_cast<unsigned*>(args.out + at.places[i]) = pair;
  }
}

// What the others do. turn: the first; those before it were guessed wrong.
template <class S>
__device__ inline void multiply_tiles(const GroupedArgs& args, int turn, GroupedShared<S>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = 0; i < turn; i++) {
    wait(shared.full[i], 0);
    if (lane == 0) arrive(shared.empty[i]);
  }
  int parity = 0;
  for (GroupedTiles tiles(shared.list, args.n / S::outputs); !tiles.done(); tiles.next(), parity ^= 1) {
    const GroupedAddresses<S> addresses = find_addresses<S>(args, *tiles);
    float sums[S::tokens / 2] = {};
    for (int i = 0; i < args.stages; i++, turn++) {
      const int slot = turn % S::stages;
      wait(shared.full[slot], turn / S::stages % 2);
      multiply_stage<S>(shared.pipeline[slot], sums);
      if (lane == 0) arrive(shared.empty[slot]);
    }
    auto& parts = shared.sums[parity];
#pragma unroll
    for (int i = 0; i < S::tokens / 2; i++)
      parts[i / 4 * 8 + lane % 4 * 2 + i % 2][warp * 16 + i / 2 % 2 * 8 + lane / 4] = sums[i];
    sync_warps<S::warps>();
    write_tile<S>(args, parts, addresses);
  }
}

template <bool kHiLoActivations, int kTokens, int kGroups, int kBoxes, int kStages, int kBlocks, Output kOutput>
__global__ void __launch_bounds__(128 * kGroups + 32, kBlocks) grouped_gemm(const __grid_constant__ GroupedArgs args) {
  using S = GroupedShape<kHiLoActivations, kTokens, kGroups, kBoxes, kStages, kOutput>;
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<GroupedShared<S>*>(memory);
  const int warp = threadIdx.x / 32;

  if (threadIdx.x == 32 * S::warps) {
    for (int i = 0; i < S::stages; i++) initialize(shared.full[i], 1), initialize(shared.empty[i], S::warps);
    publish_barriers();
    prefetch_map(args.weight);
    prefetch_map(args.x);
  }
  // Homes of each expert, and how many stages of its own a block copies before it is known whether a row chose that.
  const int per_expert = args.n / S::outputs;
  const int homes = S::output == Output::kGate ? min(int(gridDim.x) / args.experts, per_expert) : 0;
  const int guessed = homes && int(blockIdx.x) < args.experts * homes ? min(S::stages, args.stages) : 0;
  if (guessed && threadIdx.x == 32 * S::warps) copy_home<S>(args, homes, guessed, shared);
  // The GEMM behind the gates' looks at the counts as soon as it starts: they are there, since the gates' lets it
  // start only after having waited for them.
  if (S::output == Output::kGate) wait_for_prerequisites();
  launch_dependents();
  if (warp == 0) list_chunks<S::tokens>(args.counts, args.experts, per_expert, homes, shared.list);
  __syncthreads();
  const int first_turn = shared.list.work.home.count > 0 ? 0 : guessed;
  if (warp < S::warps) {
    wait_for_prerequisites();
    multiply_tiles<S>(args, first_turn, shared);
  } else if (threadIdx.x % 32 == 0) {
    for (int turn = 0; turn < first_turn; turn++) arrive(shared.full[turn]);  // nothing follows what was guessed wrong
    copy_tiles<S>(args, first_turn, guessed, shared);
  }
}

}  // namespace blink
