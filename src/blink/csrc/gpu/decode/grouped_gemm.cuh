// SPDX-License-Identifier: Apache-2.0
// Products of up to 64 decoding rows with the experts that they chose. What rows an expert treats lie behind one
// another, from places * expert on; so many of them as a tile has tokens are multiplied together. Blocks stay: each
// takes its share of all tiles, and one warp copies the tiles' weights to a ring of stages that does not run dry in
// between.
#pragma once

#include "planes.cuh"
#include "wgmma_planes.cuh"

namespace blink {

constexpr int kMaxExperts = 256, kMaxChunks = 512;  // what grouped_gemm.py keeps to

struct GroupedArgs {
  TensorMap weight;     // [experts * weight_rows, k]; kGate: gates first
  TensorMap x;          // [experts * places, k], or planes of them
  const int* counts;    // [experts], rows that chose an expert
  const int* pairs;     // kStore: [experts, places], where in out they go
  const float* scales;  // [experts, weight_rows], of FP8
  Bf16* out;            // kGate: [experts * places, n], silu(gate) * up, or planes of them; kStore: [pairs, n]
  int experts, places, n;
  int stages;  // of all of k
};

// Sizes. kGroups warpgroups take 64 weight rows each; a stage has kBoxes boxes of 128 bytes of each weight row.
template <bool kPlaned, int kTokens, int kGroups, int kBoxes, int kStages, Output kOutput>
struct GroupedShape {
  static constexpr bool planed = kPlaned;  // FP8 weights, and planes of activations
  static constexpr int tokens = kTokens, boxes = kBoxes, stages = kStages;
  static constexpr Output output = kOutput;
  static constexpr int warps = 4 * kGroups, threads = 32 * warps;  // that multiply
  static constexpr int tile = 64 * kGroups, halves = kOutput == Output::kGate ? 2 : 1, outputs = tile / halves;
  static constexpr int pairs = outputs / 2, turns = tokens * pairs / threads;  // of outputs that a thread writes
  static constexpr int box_k = planed ? 128 : 64, columns = planed ? kPlanes * tokens : tokens;
  static constexpr int weight_box = tile * 128, token_box = columns * 128;  // bytes
  static constexpr int stage = (weight_box + token_box) * boxes;
  static_assert(output != Output::kAdd && threads % pairs == 0 && tokens * pairs % threads == 0);
};

struct Chunk {  // rows of one expert that are multiplied together
  unsigned short expert, first, count, unused;
};

template <class S>
struct GroupedShared {
  alignas(1024) char ring[S::stages][S::stage];
  float sums[2][S::tokens][S::tile + 4];  // of a tile and the one before; padded against conflicts
  Chunk chunks[kMaxChunks];
  alignas(8) Barrier full[S::stages], empty[S::stages];
  int num_chunks;
};

// A block's tiles, of all chunks' one after the other.
struct GroupedWork {
  int first, last, per_chunk;
};

struct GroupedTile {
  Chunk chunk;
  int index;  // in the expert's weight

  template <class S>
  __device__ GroupedTile(const GroupedWork& work, int tile, const GroupedShared<S>& shared)
      : chunk(shared.chunks[tile / work.per_chunk]), index(tile % work.per_chunk) {}

  // Tiles start at different stages of k: those that go through it in step want the same memory channels at the same
  // time. Where, hangs on the weights alone, so that a row's sums do not hang on other rows.
  __device__ int stage(int turn, int stages) const { return ((chunk.expert + index) * 7 + turn) % stages; }
};

// List what is multiplied, by one warp.
template <class S>
__device__ inline void list_chunks(const GroupedArgs& args, GroupedShared<S>& shared) {
  const int lane = threadIdx.x % 32;
  int counts[kMaxExperts / 32], before = 0;
#pragma unroll
  for (int i = 0; i < kMaxExperts / 32; i++) counts[i] = i * 32 + lane < args.experts ? args.counts[i * 32 + lane] : 0;
#pragma unroll
  for (int i = 0; i < kMaxExperts / 32; i++) {
    const int expert = i * 32 + lane, count = counts[i], chunks = (count + S::tokens - 1) / S::tokens;
    int end = chunks;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += other;
    }
    for (int first = 0; first < count; first += S::tokens) {
      const int chunk = before + end - chunks + first / S::tokens;
      shared.chunks[chunk] = {static_cast<unsigned short>(expert), static_cast<unsigned short>(first),
                              static_cast<unsigned short>(min(S::tokens, count - first)), 0};
    }
    before += __shfl_sync(~0u, end, 31);
  }
  if (lane == 0) shared.num_chunks = before;
}

template <class S>
__device__ inline void copy_weights(const GroupedArgs& args, const GroupedTile& tile, int stage, int turn,
                                    GroupedShared<S>& shared) {
  const int slot = turn % S::stages, weight_rows = args.n * S::halves;
  const int row = tile.chunk.expert * weight_rows + tile.index * S::outputs;
  char* to = shared.ring[slot];
  expect(shared.full[slot], S::stage);
#pragma unroll
  for (int box = 0; box < S::boxes; box++, to += S::weight_box) {
    const int column = (stage * S::boxes + box) * S::box_k;
    copy_box(to, args.weight, column, row, shared.full[slot], read_once_policy());
    if (S::output == Output::kGate)
      copy_box(to + S::weight_box / 2, args.weight, column, row + args.n, shared.full[slot], read_once_policy());
  }
}

template <class S>
__device__ inline void copy_rows(const GroupedArgs& args, const GroupedTile& tile, int stage, int turn,
                                 GroupedShared<S>& shared) {
  const int slot = turn % S::stages, row = tile.chunk.expert * args.places + tile.chunk.first;
  char* to = shared.ring[slot] + S::weight_box * S::boxes;
#pragma unroll
  for (int box = 0; box < S::boxes; box++, to += S::token_box) {
    const int column = (stage * S::boxes + box) * S::box_k;
    if constexpr (S::planed)
      copy_box_3d(to, args.x, column, row, shared.full[slot], read_often_policy());
    else
      copy_box(to, args.x, column, row, shared.full[slot], read_often_policy());
  }
}

// What the copying thread does: fill the ring with weights, and from the wait on with rows, too.
template <class S>
__device__ inline void copy_tiles(const GroupedArgs& args, const GroupedWork& work, GroupedShared<S>& shared) {
  const int turns = (work.last - work.first) * args.stages, ahead = min(S::stages, turns);
  for (int turn = 0; turn < ahead; turn++) {
    const GroupedTile tile(work, work.first + turn / args.stages, shared);
    copy_weights<S>(args, tile, tile.stage(turn % args.stages, args.stages), turn, shared);
  }
  wait_for_prerequisites();
  for (int turn = 0, index = work.first; index < work.last; index++) {
    const GroupedTile tile(work, index, shared);
    for (int i = 0; i < args.stages; i++, turn++) {
      const int stage = tile.stage(i, args.stages);
      if (turn >= ahead) {
        wait(shared.empty[turn % S::stages], (turn / S::stages - 1) % 2);
        copy_weights<S>(args, tile, stage, turn, shared);
      }
      copy_rows<S>(args, tile, stage, turn, shared);
    }
  }
}

// Multiply a stage: the sums of 64 weight rows, as multiply_boxes() has them.
template <class S>
__device__ inline void multiply_stage(const char* stage, float (&sums)[S::tokens / 2]) {
  const unsigned long long weights = describe_box(stage + threadIdx.x / 128 * 8192);
  const unsigned long long rows = describe_box(stage + S::weight_box * S::boxes);
  [[maybe_unused]] float parts[S::columns / 2];
  fence_products();
#pragma unroll
  for (int step = 0; step < 4 * S::boxes; step++) {
    const int box = step / 4, in_box = step % 4 * 2;  // boxes' addresses count 16 bytes
    const unsigned long long a = weights + box * S::weight_box / 16 + in_box,
                             b = rows + box * S::token_box / 16 + in_box;
    if constexpr (!S::planed)
      multiply_boxes(sums, a, b);
    else if (step == 0)
      multiply_planes<false>(parts, a, b);
    else
      multiply_planes<true>(parts, a, b);
  }
  commit_products();
  wait_for_products<0>();
  if constexpr (S::planed) {
    constexpr int count = S::tokens / 2;
    keep(parts);
#pragma unroll
    for (int i = 0; i < count; i++)  // of one plane behind the other
      sums[i] += join_planes(parts[i], parts[i + count]);
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
  if constexpr (S::planed) {
    const float* scales = args.scales + long(tile.chunk.expert) * S::halves * args.n + output;
#pragma unroll
    for (int half = 0; half < S::halves; half++)
      for (int i = 0; i < 2; i++) found.scales[half][i] = scales[half * args.n + i] * kPlanesDivisor;
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
      values[j] = sums[token][in_tile + j] * (S::planed ? at.scales[0][j] : 1);
      if constexpr (S::output == Output::kGate) {
        const float up = sums[token][in_tile + S::outputs + j] * (S::planed ? at.scales[1][j] : 1);
        values[j] = values[j] / (1 + __expf(-values[j])) * up;
      }
    }
    const unsigned pair = to_bf16_pair(values[0], values[1]);
    if constexpr (S::planed && S::output == Output::kGate)
      write_planes(args.out, long(args.experts) * args.places * args.n, at.places[i], pair);
    else
      *reinterpret_cast<unsigned*>(args.out + at.places[i]) = pair;
  }
}

template <class S>
__device__ inline void multiply_tiles(const GroupedArgs& args, const GroupedWork& work, GroupedShared<S>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int turn = 0;
  for (int index = work.first; index < work.last; index++) {
    const GroupedTile tile(work, index, shared);
    const GroupedAddresses<S> addresses = find_addresses<S>(args, tile);
    float sums[S::tokens / 2] = {};
    for (int i = 0; i < args.stages; i++, turn++) {
      const int slot = turn % S::stages;
      wait(shared.full[slot], turn / S::stages % 2);
      multiply_stage<S>(shared.ring[slot], sums);
      if (lane == 0) arrive(shared.empty[slot]);
    }
    auto& parts = shared.sums[index % 2];
#pragma unroll
    for (int i = 0; i < S::tokens / 2; i++)
      parts[i / 4 * 8 + lane % 4 * 2 + i % 2][warp * 16 + i / 2 % 2 * 8 + lane / 4] = sums[i];
    sync_warps<S::warps>();
    write_tile<S>(args, parts, addresses);
  }
}

template <bool kPlaned, int kTokens, int kGroups, int kBoxes, int kStages, int kBlocks, Output kOutput>
__global__ void __launch_bounds__(128 * kGroups + 32, kBlocks) grouped_gemm(const __grid_constant__ GroupedArgs args) {
  using S = GroupedShape<kPlaned, kTokens, kGroups, kBoxes, kStages, kOutput>;
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<GroupedShared<S>*>(memory);
  const int warp = threadIdx.x / 32;

  if (threadIdx.x == 32 * S::warps) {
    for (int i = 0; i < S::stages; i++) initialize(shared.full[i], 1), initialize(shared.empty[i], S::warps);
    publish_barriers();
    prefetch_map(args.weight);
    prefetch_map(args.x);
  }
  // The product behind the gates' looks at the counts as soon as it starts: they are there, since the gates' lets it
  // start only after having waited for them.
  if (kOutput == Output::kGate) wait_for_prerequisites();
  launch_dependents();
  if (warp == 0) list_chunks<S>(args, shared);
  __syncthreads();
  const int per_chunk = args.n / S::outputs;
  const long tiles = long(shared.num_chunks) * per_chunk;
  const GroupedWork work = {int(tiles * blockIdx.x / gridDim.x), int(tiles * (blockIdx.x + 1) / gridDim.x), per_chunk};
  if (warp < S::warps) {
    wait_for_prerequisites();
    multiply_tiles<S>(args, work, shared);
  } else if (threadIdx.x % 32 == 0) {
    copy_tiles<S>(args, work, shared);
  }
}

}  // namespace blink
