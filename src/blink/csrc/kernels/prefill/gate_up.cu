// SPDX-License-Identifier: Apache-2.0
// silu(gate) * up of weights of 16 bits and up to 256 tokens, on Hopper. A block takes 128 outputs, of which each of
// two warpgroups multiplies the gate and up rows of 64. Or it takes 64 outputs, of which one warpgroup has the gates
// and the other the ups. A third warpgroup copies ahead. Blocks of a cluster, neighbouring tiles, read the same tokens:
// each copies a part for all.
//
// Three designs were slower on an H100. Warpgroups that take gate and up rows for half the tokens need no exchange, but
// each reads all weights. Weights were prefetched to L2. This design for QKV, o_proj and down loses to cuBLAS.
#include "kernels/args.h"
#include "kernels/common/pipeline.cuh"
#include "kernels/prefill/warpgroups.cuh"

namespace blink {

constexpr int kGateThreads = 256;  // of the warpgroups that multiply

template <int kTokens, int kOutputs, int kCluster>
struct GateShape {
  static constexpr int tokens = kTokens, outputs = kOutputs, cluster = kCluster;
  static constexpr bool has_both = kOutputs == 128;       // a warpgroup has gates and their ups
  static constexpr int matrices = has_both ? 2 : 1;       // of 64 rows, of a warpgroup
  static constexpr int sums = kTokens / 2;                // of a GEMM, of a thread
  static constexpr int own = has_both ? sums : sums / 2;  // what a thread has the gates and the ups of in the end
  static constexpr int copied_tokens = kTokens / kCluster;
  static constexpr int weight_bytes = 2 * kOutputs * kBoxRow * 2, token_bytes = kTokens * kBoxRow * 2;
  static constexpr int most_bytes = 224 << 10, stages = most_bytes / (weight_bytes + token_bytes);
  static_assert((has_both || kOutputs == 64) && copied_tokens % 8 == 0 && kTokens % 16 == 0);
};

// What a block leaves when all stages have been read. Rows are eight longer than outputs: the same columns of eight of
// them, which are stored at once, lie in other banks.
template <class S>
struct GateOutputs {
  float4 others[S::own / 4][kGateThreads];  // sums of the other warpgroup
  Bf16 rows[S::tokens][S::outputs + 8];
};

template <class S>
struct GateShared {
  alignas(1024) char weights[S::stages][S::weight_bytes];
  alignas(1024) char tokens[S::stages][S::token_bytes];
  alignas(8) Barrier full[S::stages], empty[S::stages];

  __device__ GateOutputs<S>& outputs() {
    static_assert(sizeof(weights) + sizeof(tokens) >= sizeof(GateOutputs<S>));
    return *reinterpret_cast<GateOutputs<S>*>(weights);
  }
};

// A block's first output, and the columns of x at a turn. Clusters start at different ones: see GemmPlace.
template <class S>
struct GatePlace {
  int rank, first_output, start;

  __device__ GatePlace() {
    rank = S::cluster > 1 ? int(cluster_rank()) : 0;
    first_output = blockIdx.x * S::outputs;
    start = blockIdx.x / S::cluster * 7;
  }

  __device__ int column(int turn, int boxes) const { return (start + turn) % boxes * kBoxRow; }
};

template <class S>
__device__ inline void copy_weights(const GateUpArgs& args, const GatePlace<S>& at, int turn, GateShared<S>& shared) {
  const int slot = turn % S::stages;
  expect(shared.full[slot], S::weight_bytes + S::token_bytes);
  copy_box_3d(shared.weights[slot], args.weight, at.column(turn, args.boxes), at.first_output, shared.full[slot],
              read_once_policy());
}

// Copy the block's part of the tokens to all blocks of its cluster, each of which counts all parts.
template <class S>
__device__ inline void copy_tokens(const GateUpArgs& args, const GatePlace<S>& at, int turn, GateShared<S>& shared) {
  const int slot = turn % S::stages, column = at.column(turn, args.boxes), first = at.rank * S::copied_tokens;
  char* to = shared.tokens[slot] + first * kBoxRow * 2;
  if constexpr (S::cluster > 1)
    copy_box_to_all(to, args.x, column, first, shared.full[slot], (1 << S::cluster) - 1, read_often_policy());
  else
    copy_box(to, args.x, column, first, shared.full[slot], read_often_policy());
}

// What the copying thread does; the pipeline's first weights are under way.
template <class S>
__device__ inline void copy_stages(const GateUpArgs& args, const GatePlace<S>& at, GateShared<S>& shared) {
  PipelineState<S::stages> pipeline;
  for (int turn = 0; turn < args.boxes; turn++, pipeline.advance()) {
    if (turn >= S::stages) {
      wait(shared.empty[pipeline.slot], pipeline.parity ^ 1);
      copy_weights<S>(args, at, turn, shared);
    }
    copy_tokens<S>(args, at, turn, shared);
  }
}

// Let every block of the cluster copy to a slot that this warp has read.
template <class S>
__device__ inline void leave_slot(GateShared<S>& shared, int slot) {
  const int lane = threadIdx.x % 32;
  if constexpr (S::cluster > 1) {
    if (lane < S::cluster) arrive_in_cluster(address_in(lane, &shared.empty[slot]));
  } else {
    if (lane == 0) arrive(shared.empty[slot]);
  }
}

// Multiply all stages; sums of 64 gates, then of their ups, or of one of both, as multiply_boxes() has them.
template <class S>
__device__ inline void multiply_stages(int boxes, GateShared<S>& shared, float (&sums)[S::matrices][S::sums]) {
  const int first_row = threadIdx.x / 128 * 64;
  PipelineState<S::stages> pipeline;
  int left = -1;  // the slot before
  for (int turn = 0; turn < boxes; turn++) {
    wait(shared.full[pipeline.slot], pipeline.parity);
    const char* weights = shared.weights[pipeline.slot] + first_row * kBoxRow * 2;
    const unsigned long long of_tokens = describe_box(shared.tokens[pipeline.slot]);
    fence_wgmma();
#pragma unroll
    for (int step = 0; step < kBoxRow / 16; step++)
#pragma unroll
      for (int i = 0; i < S::matrices; i++)  // descriptors count 16 bytes
        multiply_boxes(sums[i], describe_box(weights + i * S::outputs * kBoxRow * 2) + step * 2, of_tokens + step * 2);
    commit_wgmma();
    wait_for_wgmma<1>();
    if (left >= 0) leave_slot<S>(shared, left);
    left = pipeline.slot;
    pipeline.advance();
  }
  wait_for_wgmma<0>();
#pragma unroll
  for (int i = 0; i < S::matrices; i++) keep(sums[i]);
}

// Give the other warpgroup's thread the sums of half of the tokens, for those that it has of the other half.
template <class S>
__device__ inline void exchange_sums(const float (&sums)[S::sums], GateShared<S>& shared, float (&gates)[S::own],
                                     float (&ups)[S::own]) {
  const int group = threadIdx.x / 128;
  auto& others = shared.outputs().others;
#pragma unroll
  for (int to = 0; to < 2; to++) {
    const float* half = sums + to * S::own;
#pragma unroll
    for (int i = 0; i < S::own; i += 4) {
      if (to == group) continue;
      others[i / 4][threadIdx.x ^ 128] = {half[i], half[i + 1], half[i + 2], half[i + 3]};
    }
  }
  sync_multiplying();
#pragma unroll
  for (int i = 0; i < S::own; i++) {
    const float mine = group == 0 ? sums[i] : sums[S::own + i];
    const float other = reinterpret_cast<const float*>(&others[i / 4][threadIdx.x])[i % 4];
    gates[i] = group == 0 ? mine : other, ups[i] = group == 0 ? other : mine;
  }
}

// Write the outputs of a thread's gates and their ups, through shared memory.
template <class S>
__device__ inline void write_outputs(const GateUpArgs& args, const GatePlace<S>& at, const float (&gates)[S::own],
                                     const float (&ups)[S::own], GateShared<S>& shared) {
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int column = (S::has_both ? group * 64 : 0) + threadIdx.x / 32 % 4 * 16 + lane / 8 % 2 * 8;
  const int row = (S::has_both ? 0 : group * (S::tokens / 2)) + lane % 8;
  auto& rows = shared.outputs().rows;
  const auto pair = [&](int i) { return to_bf16_pair(silu(gates[i]) * ups[i], silu(gates[i + 1]) * ups[i + 1]); };
#pragma unroll
  for (int i = 0; i < S::own; i += 4) store_transposed(&rows[row + i * 2][column], pair(i), pair(i + 2));
  sync_multiplying();
  constexpr int chunk = 8, chunks = S::outputs / chunk;
  const int first = threadIdx.x % chunks * chunk, output = at.first_output + first;
  if (output >= args.outputs) return;
  for (int token = threadIdx.x / chunks; token < min(S::tokens, args.rows); token += kGateThreads / chunks)
    *reinterpret_cast<Vec16*>(args.out + long(token) * args.outputs + output) =
        *reinterpret_cast<const Vec16*>(&rows[token][first]);
}

template <class S>
__device__ inline void multiply_tile(const GateUpArgs& args, const GatePlace<S>& at, GateShared<S>& shared) {
  float sums[S::matrices][S::sums] = {};
  multiply_stages<S>(args.boxes, shared, sums);
  sync_multiplying();
  if constexpr (S::has_both) {
    write_outputs<S>(args, at, sums[0], sums[1], shared);
  } else {
    float gates[S::own], ups[S::own];
    exchange_sums<S>(sums[0], shared, gates, ups);
    write_outputs<S>(args, at, gates, ups, shared);
  }
}

template <int kTokens, int kOutputs, int kCluster>
__global__ void __launch_bounds__(kGateThreads + 128, 1) gate_prompts(const __grid_constant__ GateUpArgs args) {
  using S = GateShape<kTokens, kOutputs, kCluster>;
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<GateShared<S>*>(memory);
  const GatePlace<S> at;
  const bool copies = threadIdx.x == kGateThreads;
  if (copies) {
    for (int i = 0; i < S::stages; i++)
      initialize(shared.full[i], 1), initialize(shared.empty[i], kGateThreads / 32 * S::cluster);
    publish_barriers();
    prefetch_map(args.x);
    for (int turn = 0; turn < S::stages && turn < args.boxes; turn++) copy_weights<S>(args, at, turn, shared);
  }
  launch_dependents();
  __syncthreads();
  if constexpr (S::cluster > 1) cluster_arrive(), cluster_wait();  // all have their barriers
  wait_for_prerequisites();
  if (threadIdx.x >= kGateThreads) {
    give_registers<24>();
    if (copies) copy_stages<S>(args, at, shared);
  } else {
    take_registers<240>();
    multiply_tile<S>(args, at, shared);
  }
  if constexpr (S::cluster > 1) {  // nobody arrives at the barriers of a block that has ended
    __syncwarp();
    cluster_arrive_relaxed(), cluster_wait();
  }
}

}  // namespace blink
