// SPDX-License-Identifier: Apache-2.0
// GEMMs of 3 to 128 rows of activations with a weight [out, in], for decoding. One thread of a block copies tiles of
// the weight to a pipeline of stages in shared memory. It begins before the block waits for the activations. Warpgroups
// multiply the tiles, weight rows by tokens. The norm is split: what writes the residual also writes it times the next
// norm's weight, and its squares. The GEMM scales its sums by the rate.
//
// Activations shared by neighbouring tiles (multicast) gained nothing at 32 and 64 rows. Of more than 128 rows cuBLAS
// is faster: a block's accumulators and one pipeline then fill an SM, and no other block multiplies while it fills or
// ends.
#pragma once

#include "kernels/args.h"
#include "kernels/common/wgmma.cuh"
#include "kernels/gemm/epilogue.cuh"

namespace blink {

// Sizes. kGroups warpgroups take 64 weight rows each; kCluster blocks share k; a stage holds kStageK of it. What is
// written may be hi/lo FP8, kWrites.
template <int kTokens_, int kGroups_, int kCluster_, int kStageK_, int kStages_, Output kOutput_, bool kNorm_,
          FormatId kWrites_, int kInstruction_ = 0>
struct GemmShape : OutputShape<kTokens_, kGroups_, kCluster_, kOutput_, kNorm_, false, kWrites_, kInstruction_> {
  using Outputs = OutputShape<kTokens_, kGroups_, kCluster_, kOutput_, kNorm_, false, kWrites_, kInstruction_>;
  static constexpr int stage_k = kStageK_, stages = kStages_;
  static constexpr int weight_boxes = stage_k / kBoxRow, weight_columns = kBoxRow;  // of a stage; of a box
  static constexpr int other_warps = 2;                                             // one copies, one sums squares
  static constexpr int weight_tile = Outputs::tile * kBoxRow, token_tile = Outputs::tokens * kBoxRow;
  static constexpr int stage = (weight_tile + token_tile) * (stage_k / kBoxRow);  // elements
  static constexpr int pipeline_bytes = stages * stage * 2;
  // Partial sums take the pipeline's place where they are many, at the price of one more wait for each other.
  static constexpr bool reuse = sizeof(Parts<Outputs>) > 8192;
  // SMs hold so many blocks. Activations of many rows are more bytes than a group's weights: four share
  // them.
  static constexpr int blocks = kTokens_ <= 64 ? 4 - kGroups_ : kGroups_ <= 2 ? 2 : 1;
  static_assert(kGroups_ <= (kTokens_ <= 64 ? 2 : 4) && stage_k % kBoxRow == 0);
  static_assert(!reuse || pipeline_bytes >= int(sizeof(Parts<Outputs>)));
};

template <class S>
struct GemmShared {
  alignas(1024) Bf16 pipeline[S::stages][S::stage];
  alignas(16) char own_parts[S::reuse ? 16 : sizeof(Parts<typename S::Outputs>)];
  alignas(16) float square_sums[S::cluster][S::tokens];  // from each block of the cluster
  alignas(8) Barrier full[S::stages], empty[S::stages], exchanged;

  __device__ Parts<typename S::Outputs>& parts() {
    return *reinterpret_cast<Parts<typename S::Outputs>*>(S::reuse ? reinterpret_cast<char*>(pipeline) : own_parts);
  }
};

// A block's place, and its part of k in stages. Blocks start at different stages of it: those that go through k in step
// want the same memory channels at the same time.
struct GemmPlace : OutputPlace {
  int first_stage, turns;

  __device__ int stage(int turn) const { return first_stage + (tile * 7 + turn) % turns; }
};

template <class S>
__device__ inline void copy_weights(const GemmArgs& args, const GemmPlace& at, int turn, GemmShared<S>& shared) {
  const int slot = turn % S::stages, row = at.tile * S::outputs;
  Bf16* to = shared.pipeline[slot];
  expect(shared.full[slot], S::stage * 2);
#pragma unroll
  for (int part = 0; part < S::weight_boxes; part++, to += S::weight_tile) {
    const int column = (at.stage(turn) * S::weight_boxes + part) * S::weight_columns;
    copy_box(to, args.weight, column, row, shared.full[slot], read_once_policy());
    if (S::output == Output::kGate)
      copy_box(to + S::weight_tile / 2, args.weight, column, row + args.output.n, shared.full[slot],
               read_once_policy());
  }
}

template <class S>
__device__ inline void copy_activations(const GemmArgs& args, const GemmPlace& at, int turn, GemmShared<S>& shared) {
  const int slot = turn % S::stages;
  Bf16* to = shared.pipeline[slot] + S::weight_tile * S::weight_boxes;
#pragma unroll
  for (int part = 0; part < S::stage_k / kBoxRow; part++, to += S::token_tile)
    copy_box(to, args.x, at.stage(turn) * S::stage_k + part * kBoxRow, at.first_token, shared.full[slot],
             read_often_policy());
}

// What the copying thread does once the pipeline has its first weights.
template <class S>
__device__ inline void copy_stages(const GemmArgs& args, const GemmPlace& at, GemmShared<S>& shared) {
  for (int turn = 0; turn < S::stages && turn < at.turns; turn++) copy_activations<S>(args, at, turn, shared);
  for (int turn = S::stages; turn < at.turns; turn++) {
    wait(shared.empty[turn % S::stages], (turn / S::stages - 1) % 2);
    copy_weights<S>(args, at, turn, shared);
    copy_activations<S>(args, at, turn, shared);
  }
}

// The first boxes of a stage: of the warpgroup's weights and of the activations.
struct StageBoxes {
  unsigned long long weights, tokens;
};

// Wait until a stage is there.
template <class S>
__device__ inline StageBoxes await_stage(int turn, GemmShared<S>& shared) {
  const int slot = turn % S::stages, group = threadIdx.x / 128;
  wait(shared.full[slot], turn / S::stages % 2);
  return {describe_box(shared.pipeline[slot] + group * 64 * kBoxRow),
          describe_box(shared.pipeline[slot] + S::weight_tile * S::weight_boxes)};
}

// So many of a thread's sums, from one on.
template <int kCount, int kAll>
__device__ inline float (&sums_from(float (&sums)[kAll], int first))
    [kCount] { return reinterpret_cast<float (&)[kCount]>(sums[first]); }

// Multiply some stages; the sums of 64 weight rows, as multiply_boxes() has them.
template <class S>
__device__ inline void multiply_turns(const GemmPlace& at, int first_turn, int end, GemmShared<S>& shared,
                                      float (&sums)[S::tokens / 2]) {
  for (int turn = first_turn; turn < end; turn++) {
    const auto [weights, tokens] = await_stage<S>(turn, shared);
    fence_wgmma();
#pragma unroll
    for (int step = 0; step < S::stage_k / 16; step++) {
      const int part = step / 4, in_part = step % 4 * 2;  // tiles' addresses count 16 bytes
#pragma unroll
      for (int first = 0; first < S::tokens; first += S::instruction)
        multiply_boxes(sums_from<S::instruction / 2>(sums, first / 2), weights + part * S::weight_tile / 8 + in_part,
                       tokens + (part * S::token_tile + first * kBoxRow) / 8 + in_part);
    }
    commit_wgmma();
    wait_for_wgmma<0>();
    if (threadIdx.x % 32 == 0 && turn + S::stages < at.turns) arrive(shared.empty[turn % S::stages]);
  }
}

// Multiply all stages.
template <class S>
__device__ inline void multiply_stages(const GemmArgs&, const GemmPlace& at, GemmShared<S>& shared,
                                       float (&sums)[S::tokens / 2]) {
  multiply_turns<S>(at, 0, at.turns, shared, sums);
}

// The weight row at a place in a block's tile; behind the last row, the last.
template <class S>
__device__ inline int weight_row(const GemmArgs& args, const GemmPlace& at, int in_tile) {
  return min(at.tile * S::outputs + in_tile % S::outputs, args.output.n - 1) + in_tile / S::outputs * args.output.n;
}

// What weights of 4 bits need beside: gemm_hi_lo_int4.cuh.
template <class S>
__device__ inline void initialize_others(GemmShared<S>&) {}

template <class S>
__device__ inline void add_activations(const GemmArgs&, const GemmPlace&, GemmShared<S>&) {}

// What a block does before its first __syncthreads() beside copying.
template <class S>
__device__ inline void prepare(const GemmArgs&, const GemmPlace&, GemmShared<S>&) {}

// Blocks that follow each other have the same weights, for one tile of tokens after the other.
template <class S>
__device__ inline GemmPlace find_gemm_place(const GemmArgs& args) {
  const int unit = blockIdx.x / S::cluster, tiles = S::tiled ? (args.output.rows + S::tokens - 1) / S::tokens : 1;
  GemmPlace at;
  at.rank = S::cluster > 1 ? int(cluster_rank()) : 0;
  at.tile = S::tiled ? unit / tiles : unit;
  at.first_token = S::tiled ? unit % tiles * S::tokens : 0;
  at.tokens = tiles * S::tokens;
  at.first_stage = args.stages * at.rank / S::cluster;
  at.turns = args.stages * (at.rank + 1) / S::cluster - at.first_stage;
  return at;
}

// What a GEMM does that adds nothing to its sums; gemm_updated.cuh has another.
struct NoUpdate {
  __device__ void await_input() const {}  // in the copying thread
  __device__ void await() const { wait_for_prerequisites(); }

  template <class S, class Args, class Shared>
  __device__ void multiply(const Args& args, const GemmPlace& at, Shared& shared, float (&sums)[S::tokens / 2]) const {
    multiply_stages<S>(args, at, shared, sums);
  }
};

template <class S, class Args, class Shared, class Update = NoUpdate>
__device__ inline void compute_gemm(const Args& args, Shared& shared, const Update& update = {}) {
  using Outputs = typename S::Outputs;
  constexpr int warps = 4 * S::groups;  // that multiply
  const int warp = threadIdx.x / 32;
  const GemmPlace at = find_gemm_place<S>(args);

  if (threadIdx.x == 32 * warps) {
    for (int i = 0; i < S::stages; i++) initialize(shared.full[i], 1), initialize(shared.empty[i], warps);
    if (S::cluster > 1) initialize(shared.exchanged, 1), expect(shared.exchanged, Outputs::exchanged);
    initialize_others<S>(shared);
    publish_barriers();
    prefetch_map(args.x);
    for (int turn = 0; turn < S::stages && turn < at.turns; turn++) copy_weights<S>(args, at, turn, shared);
  }
  launch_dependents();
  if (threadIdx.x == 32 * warps) update.await_input();
  prepare<S>(args, at, shared);
  __syncthreads();
  if (S::cluster > 1 && !S::reuse) cluster_arrive_relaxed();  // all have started once all have waited, below
  Addends<Outputs> addends = {};
  float sums[S::tokens / 2] = {};
  float4 square_sums[S::instructions] = {};
  update.await();
  if (warp < warps) {
    addends = load_addends<Outputs>(args.output, at);
    update.template multiply<S>(args, at, shared, sums);
  } else if (warp == warps) {
    if (threadIdx.x % 32 == 0) copy_stages<S>(args, at, shared);
    __syncwarp();
  } else if (warp == warps + S::other_warps - 1) {
    if (S::norm)
#pragma unroll
      for (int i = 0; i < S::instructions; i++) square_sums[i] = add_square_sums<Outputs>(args.output, at, i);
  } else {
    add_activations<S>(args, at, shared);
  }
  if (S::cluster > 1) {
    if (S::reuse) cluster_arrive_relaxed();  // GEMMs have read the pipeline
    cluster_wait();
  } else if (S::reuse) {
    __syncthreads();
  }
  if (warp < warps) send_sums<Outputs>(at.rank, sums, shared.parts(), shared.exchanged);
  if (S::norm && warp == warps + S::other_warps - 1)
    send_square_sums<Outputs>(at.rank, square_sums, shared.square_sums, shared.exchanged);
  if (S::cluster == 1)
    __syncthreads();
  else if (warp < warps)
    wait(shared.exchanged, 0);
  if (warp < warps) write_outputs<Outputs>(args.output, at, shared.parts(), shared.square_sums, addends);
}

template <int kTokens, int kGroups, int kCluster, int kStageK, int kStages, Output kOutput, bool kNorm,
          FormatId kWrites>
__global__ void __launch_bounds__(
    128 * kGroups + 64, GemmShape<kTokens, kGroups, kCluster, kStageK, kStages, kOutput, kNorm, kWrites>::blocks)
    gemm(const __grid_constant__ GemmArgs args) {
  using S = GemmShape<kTokens, kGroups, kCluster, kStageK, kStages, kOutput, kNorm, kWrites>;
  extern __shared__ __align__(1024) char memory[];
  compute_gemm<S>(args, *reinterpret_cast<GemmShared<S>*>(memory));
}

// The same of any number of tokens, in tiles of kTokens of which each instruction multiplies kInstruction. A token's
// bits then depend on kGroups, kCluster and kStageK alone: these and kInstruction are to be the same for all kTokens.
template <int kInstruction, int kTokens, int kGroups, int kCluster, int kStageK, int kStages, Output kOutput,
          bool kNorm, FormatId kWrites>
__global__ void __launch_bounds__(
    128 * kGroups + 64,
    GemmShape<kTokens, kGroups, kCluster, kStageK, kStages, kOutput, kNorm, kWrites, kInstruction>::blocks)
    gemm_in_tiles(const __grid_constant__ GemmArgs args) {
  using S = GemmShape<kTokens, kGroups, kCluster, kStageK, kStages, kOutput, kNorm, kWrites, kInstruction>;
  extern __shared__ __align__(1024) char memory[];
  compute_gemm<S>(args, *reinterpret_cast<GemmShared<S>*>(memory));
}

}  // namespace blink
