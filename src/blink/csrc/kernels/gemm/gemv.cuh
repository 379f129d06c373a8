// SPDX-License-Identifier: Apache-2.0
// GEMMs of a few rows of activations with a weight [out, in], for decoding. One warp of a block copies weight rows to a
// pipeline of stages in shared memory. It begins before the block waits for the activations. The other warps split k,
// keep their part of the activations in registers and multiply. The norm before the GEMM is part of it. So is the
// residual or activation after it.
#pragma once

#include "kernels/args.h"
#include "kernels/common/ptx.cuh"

namespace blink {

// Sizes. A 16-byte load of a warp takes 32 * kSlices consecutive k of 8 / kSlices weight rows. To the matrix
// instruction these are 8 columns of 32 k, and the activations' slices are as many rows: of its 16 rows x 8 columns
// only those of the same slice count. kCluster blocks share k, kTile weight rows are a block's, kStageRows of them at
// once in a stage.
template <int kRows_, int kK_, int kWarps_, int kCluster_, int kSlices_, int kTile_, int kStageRows_, int kStages_,
          Output kOutput_, bool kNorm_, class Norm_ = Bf16>
struct GemvShape {
  using Norm = Norm_;  // its weights
  static constexpr int rows = kRows_, k = kK_, warps = kWarps_, cluster = kCluster_, slices = kSlices_, tile = kTile_;
  static constexpr int stage_rows = kStageRows_, stages = kStages_;
  static constexpr Output output = kOutput_;
  static constexpr bool norm = kNorm_, scaled = false;
  // Few rows leave half of the instruction's rows free; these then take every second pair of k.
  static constexpr bool folded = rows * slices <= 8;
  static constexpr int slots = (folded ? 8 : 16) / slices;  // rows of one slice
  static constexpr int group = 8 / slices;                  // weight rows of a load
  static constexpr int walk = group;                        // weight rows that are multiplied at once
  static constexpr int span = 32 * slices;                  // k of a load
  static constexpr int block_k = k / cluster;
  static constexpr int steps = block_k / (span * warps);
  static constexpr int parts = folded ? 1 : 2;  // of a step's activations: rows 0 to 7 and 8 to 15 of the instruction
  static constexpr int outputs = output == Output::kGate ? tile / 2 : tile;
  static constexpr int turns = tile / stage_rows;
  static constexpr int row_bytes = k * 2, block_bytes = block_k * 2;
  static constexpr int pitch = block_k + (group > 1 ? 32 : 0);  // of rows in a stage, against bank conflicts
  static constexpr int partials = warps * slices;
  static constexpr int threads = 32 * (warps + 1);
  static constexpr int share = outputs / cluster;  // that one block of a cluster writes
  static constexpr int outputs_per_thread = (rows * share + 32 * warps - 1) / (32 * warps);
  static_assert(rows <= slots && slots <= 8 && steps * span * warps * cluster == k);
  static_assert(turns * stage_rows == tile && stage_rows % group == 0 && outputs % cluster == 0);
};

template <class S>
constexpr int kExchanged = S::rows * (S::tile + S::norm * S::cluster) * 4;  // bytes that a block gets

template <class S>
struct GemvShared {
  alignas(128) Bf16 pipeline[S::stages][S::stage_rows][S::pitch];
  float sums[S::partials][S::rows][S::tile + 1];
  float square_sums[S::warps][S::rows];
  // Of the cluster's blocks, for the outputs that this one writes.
  float from_blocks[S::cluster][S::rows][S::tile / S::cluster + 1], square_sums_from[S::cluster][S::rows];
  alignas(8) Barrier full[S::stages], empty[S::stages], exchanged;
};

// Copy a stage of weight rows. The last tile ends with the last output, some of which two tiles then compute.
template <class S>
__device__ inline void copy_stage(const GemvArgs& args, int tile, int rank, int turn, GemvShared<S>& shared) {
  const int slot = turn % S::stages, first = min(tile * S::outputs, args.n - S::outputs);
  expect(shared.full[slot], S::stage_rows * S::block_bytes);
  // Rows that are neighbours here and there come together.
  constexpr bool together = S::pitch * 2 == S::row_bytes && S::outputs % S::stage_rows == 0;
  constexpr int run = together ? S::stage_rows : 1;
#pragma unroll
  for (int i = 0; i < S::stage_rows; i += run) {
    const int in_tile = turn * S::stage_rows + i;
    const int row = first + (in_tile < S::outputs ? in_tile : in_tile - S::outputs + args.n);
    const char* from = reinterpret_cast<const char*>(args.weight) + long(row) * S::row_bytes + rank * S::block_bytes;
    copy_once(shared.pipeline[slot][i], from, run * S::block_bytes, shared.full[slot]);
  }
}

// What one thread of the copying warp does.
template <class S>
__device__ inline void copy_weights(const GemvArgs& args, int tile, int rank, GemvShared<S>& shared) {
  for (int turn = S::stages; turn < S::turns; turn++) {
    wait(shared.empty[turn % S::stages], (turn / S::stages - 1) % 2);
    copy_stage<S>(args, tile, rank, turn, shared);
  }
}

template <class S>
__device__ inline const typename S::Norm* norm_of(const GemvArgs& args) {
  return static_cast<const typename S::Norm*>(args.norm);
}

// Bring the norm's weights to L2, where they have not survived since the last step.
template <class S>
__device__ inline void fetch_norm(const GemvArgs& args, int rank) {
  constexpr int line = 128 / sizeof(typename S::Norm);
  for (int k = threadIdx.x * line; k < S::block_k; k += S::warps * 32 * line)
    prefetch_line(norm_of<S>(args) + rank * S::block_k + k);
}

template <class S>
struct Activations {  // a warp's part of them, as the matrix instruction takes them
  Vec16 values[S::steps][S::parts];
};

// Add up a warp's squares of each row, and leave them for exchange().
template <class S>
__device__ inline void keep_square_sums(float square_sums, int warp, GemvShared<S>& shared) {
  const int lane = threadIdx.x % 32, row = lane / 4;
#pragma unroll
  for (int step = 1; step < 32; step *= 2)
    if (step < 4 || step >= 4 * S::slots) square_sums += __shfl_xor_sync(~0u, square_sums, step);
  if (lane % 4 == 0 && row < S::slots && row < S::rows) shared.square_sums[warp][row] = square_sums;
}

// Load a warp's activations, times the norm's weights. Lanes whose row is beyond the last one take that again: what
// they compute, nobody reads. Leaves each row's sum of squares.
template <class S>
__device__ inline void load_activations(const GemvArgs& args, int first_k, int warp, Activations<S>& to,
                                        GemvShared<S>& shared) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  const int k = first_k + row / S::slots * 32 + lane % 4 * 8;
  const Bf16* from = args.x + long(min(row % S::slots, S::rows - 1)) * S::k;
#pragma unroll
  for (int step = 0; step < S::steps; step++)
#pragma unroll
    for (int part = 0; part < S::parts; part++)
      to.values[step][part] = load(from + k + step * S::span + part * (8 / S::slots * 32));
  if (!S::norm) return;
  float square_sums = 0;
#pragma unroll
  for (int step = 0; step < S::steps; step++)
#pragma unroll
    for (int part = 0; part < S::parts; part++) {
      Vec16& v = to.values[step][part];
      square_sums += square_sum(v);
      v = normalize(v, norm_of<S>(args) + k + step * S::span + part * (8 / S::slots * 32));
    }
  keep_square_sums<S>(square_sums, warp, shared);
}

// Multiply one group of a stage's weight rows; what counts of the results goes to the warp's sums.
template <class S>
__device__ inline void multiply_group(const Bf16* weights, const Activations<S>& x, int warp, int in_tile,
                                      GemvShared<S>& shared) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  const Bf16* from = weights + row % S::group * S::pitch + row / S::group * 32 + lane % 4 * 8;
  float first[4] = {}, second[4] = {};
#pragma unroll
  for (int step = 0; step < S::steps; step++) {
    const Vec16 b = *reinterpret_cast<const Vec16*>(from + step * S::span), a = x.values[step][0];
    if constexpr (S::folded) {
      multiply_add(first, a.x, a.z, a.y, a.w, b.x, b.y);
      multiply_add(second, a.x, a.z, a.y, a.w, b.z, b.w);
    } else {
      const Vec16 c = x.values[step][S::parts - 1];
      multiply_add(first, a.x, c.x, a.y, c.y, b.x, b.y);
      multiply_add(second, a.z, c.z, a.w, c.w, b.z, b.w);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int column = lane % 4 * 2 + i, slice = column / S::group, token = row % S::slots;
    if (token >= S::rows) continue;
    float* sums = &shared.sums[warp * S::slices + slice][token][in_tile + column % S::group];
    if constexpr (S::folded) {
      if (row / S::slots == slice) *sums = first[i] + second[i + 2];
    } else {
      if (row / S::slots == slice) *sums = first[i] + second[i];
      if ((row + 8) / S::slots == slice) *sums = first[i + 2] + second[i + 2];
    }
  }
}

// Call multiply(weights, in_tile) with each group of weight rows, and the first one's place in the tile, as the
// pipeline has them.
template <class S, class Multiply>
__device__ inline void walk_pipeline(GemvShared<S>& shared, Multiply multiply) {
#pragma unroll 1
  for (int turn = 0; turn < S::turns; turn++) {
    const int slot = turn % S::stages;
    wait(shared.full[slot], turn / S::stages % 2);
#pragma unroll
    for (int row = 0; row < S::stage_rows; row += S::walk)
      multiply(shared.pipeline[slot][row], turn * S::stage_rows + row);
    __syncwarp();
    if (threadIdx.x % 32 == 0 && turn + S::stages < S::turns) arrive(shared.empty[slot]);
  }
}

template <class S>
__device__ inline void multiply_weights(const GemvArgs& args, int rank, int warp, GemvShared<S>& shared) {
  const int warp_k = warp * S::steps * S::span;
  Activations<S> x;
  load_activations<S>(args, rank * S::block_k + warp_k, warp, x, shared);
  walk_pipeline<S>(
      shared, [&](const Bf16* weights, int in_tile) { multiply_group<S>(weights + warp_k, x, warp, in_tile, shared); });
}

// Add up the block's sums of a weight row; four neighbouring lanes do it together.
template <class S>
__device__ inline float add_up(const GemvShared<S>& shared, int row, int in_tile) {
  float sum = 0;
#pragma unroll
  for (int i = threadIdx.x % 4; i < S::partials; i += 4) sum += shared.sums[i][row][in_tile];
  sum += __shfl_xor_sync(~0u, sum, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}

// Send the block's sums to those that write the outputs: each block of a cluster a part of them.
template <class S>
__device__ inline void exchange(int rank, GemvShared<S>& shared) {
  for (int at = threadIdx.x / 4; at < S::rows * S::tile; at += S::threads / 4) {
    const int row = at / S::tile, in_tile = at % S::tile, output = in_tile % S::outputs;
    const float sum = add_up<S>(shared, row, in_tile);
    const int place = output % S::share + in_tile / S::outputs * S::share;
    if (threadIdx.x % 4 == 0)
      send<S::cluster>(output / S::share, sum, shared.from_blocks[rank][row][place], shared.exchanged);
  }
  if (S::norm && threadIdx.x < S::rows * S::cluster) {
    const int row = threadIdx.x % S::rows;
    float sum = 0;
    for (int warp = 0; warp < S::warps; warp++) sum += shared.square_sums[warp][row];
    send<S::cluster>(threadIdx.x / S::rows, sum, shared.square_sums_from[rank][row], shared.exchanged);
  }
}

// The outputs that a thread writes. What they are added to is loaded long before.
template <class S>
struct Outputs {
  Bf16* place[S::outputs_per_thread];
  float addend[S::outputs_per_thread];
  float scale[S::scaled ? S::outputs_per_thread : 1], up_scale[S::scaled ? S::outputs_per_thread : 1];
};

template <class S>
__device__ inline Outputs<S> load_addends(const GemvArgs& args, int tile, int rank) {
  const int first = min(tile * S::outputs, args.n - S::outputs);
  Outputs<S> to;
#pragma unroll
  for (int i = 0; i < S::outputs_per_thread; i++) {
    const int at = i * 32 * S::warps + threadIdx.x;
    const int output = first + rank * S::share + at % S::share;
    // The tile before writes what this one only shares with it.
    const bool writes = at < S::rows * S::share && output >= tile * S::outputs;
    to.place[i] = writes ? args.out + long(at / S::share) * args.n + output : nullptr;
    to.addend[i] = 0;
    if (!writes) continue;
    if constexpr (S::scaled) {
      to.scale[i] = args.scales[output];
      if (S::output == Output::kGate) to.up_scale[i] = args.scales[output + args.n];
    }
    if (S::output == Output::kAdd) to.addend[i] = to_float(*to.place[i]);
    if (S::output != Output::kGate && args.bias) to.addend[i] += to_float(args.bias[output]);
  }
  return to;
}

template <class S>
__device__ inline void write_outputs(const GemvArgs& args, const GemvShared<S>& shared, const Outputs<S>& to) {
#pragma unroll
  for (int i = 0; i < S::outputs_per_thread; i++) {
    if (!to.place[i]) continue;
    const int at = i * 32 * S::warps + threadIdx.x, row = at / S::share, output = at % S::share;
    float value = 0, up = 0, square_sums = 0;
#pragma unroll
    for (int block = 0; block < S::cluster; block++) {
      value += shared.from_blocks[block][row][output];
      if (S::output == Output::kGate) up += shared.from_blocks[block][row][output + S::share];
      if (S::norm) square_sums += shared.square_sums_from[block][row];
    }
    const float rate = S::norm ? rsqrtf(square_sums / S::k + args.eps) : 1;
    if constexpr (S::scaled) value *= to.scale[i], up *= to.up_scale[i];
    value *= rate;
    if (S::output == Output::kGate) value = silu(value) * up * rate;
    *to.place[i] = to_bf16(value + to.addend[i]);
  }
}

// What a block does before its first __syncthreads() beside copying.
template <class S>
__device__ inline void prepare(const GemvArgs&, int, int, GemvShared<S>&) {}

template <class S, class Args, class Shared>
__device__ inline void compute_gemv(const Args& args, Shared& shared) {
  const int rank = S::cluster > 1 ? int(cluster_rank()) : 0;
  const int tile = blockIdx.x / S::cluster, warp = threadIdx.x / 32;

  if (threadIdx.x == 32 * S::warps) {
    for (int i = 0; i < S::stages; i++) initialize(shared.full[i], 1), initialize(shared.empty[i], S::warps);
    if (S::cluster > 1) initialize(shared.exchanged, 1), expect(shared.exchanged, kExchanged<S>);
    publish_barriers();
    for (int turn = 0; turn < S::stages && turn < S::turns; turn++) copy_stage<S>(args, tile, rank, turn, shared);
  }
  launch_dependents();
  prepare<S>(args, tile, rank, shared);
  __syncthreads();
  if (S::cluster > 1) cluster_arrive_relaxed();  // all blocks have started once all have waited, below
  Outputs<S> to = {};
  if (warp == S::warps) {
    if (threadIdx.x % 32 == 0) copy_weights<S>(args, tile, rank, shared);
    __syncwarp();
  } else {
    if (S::norm) fetch_norm<S>(args, rank);
    wait_for_prerequisites();
    to = load_addends<S>(args, tile, rank);
    multiply_weights<S>(args, rank, warp, shared);
  }
  __syncthreads();
  if (S::cluster > 1) cluster_wait();
  exchange<S>(rank, shared);
  receive<S::cluster>(shared.exchanged);
  write_outputs<S>(args, shared, to);
}

template <int kRows, int kK, int kWarps, int kCluster, int kSlices, int kTile, int kStageRows, int kStages,
          Output kOutput, bool kNorm, class Norm = Bf16>
__global__ void __launch_bounds__(32 * (kWarps + 1), kWarps <= 4 ? 3 : 2) gemv(const GemvArgs args) {
  using S = GemvShape<kRows, kK, kWarps, kCluster, kSlices, kTile, kStageRows, kStages, kOutput, kNorm, Norm>;
  extern __shared__ __align__(1024) char memory[];
  compute_gemv<S>(args, *reinterpret_cast<GemvShared<S>*>(memory));
}

}  // namespace blink
