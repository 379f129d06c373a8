// SPDX-License-Identifier: Apache-2.0
// Products of a few rows of activations with a weight [out, in], for decoding. A block computes 8 outputs of all rows;
// its warps split k, and all weights of a block are on their way to registers before it waits for the activations. The
// norm before and the residual or activation behind the product are part of it.
#pragma once

#include "ptx.cuh"

namespace blink {

enum class Output { kStore, kAdd, kGate };  // out = product + bias; out += product + bias; silu(gate) * up

struct GemvArgs {
  const Bf16* weight;  // [n, k]; kGate: [2 * n, k], gates first
  const Bf16* bias;    // [n] or null
  const Bf16* x;       // [rows, k]
  const Bf16* norm;    // [k], with kNorm
  Bf16* out;           // [rows, n]
  float eps;
  int n;
  int ahead;  // tiles ahead of which the first ones fetch weights to L2
};

constexpr int kTile = 8;     // outputs of a block: the columns of one matrix instruction
constexpr int kStepK = 32;   // k of one 16-byte load by each of a row's four lanes
constexpr int kAccumulators = 4;
constexpr int kStagedRows = 2;  // up to so many rows pass through shared memory: one latency instead of several

// What follows from the sizes. A warp's slice of k is `steps` loads of each lane.
template <int kRows, int kK, int kWarps, int kCluster>
struct GemvShape {
  static constexpr int steps = (kK + kStepK * kWarps * kCluster - 1) / (kStepK * kWarps * kCluster);
  static constexpr int slice = steps * kStepK;
  static constexpr bool whole = slice * kWarps * kCluster == kK;  // no lane's k is beyond the end
  static constexpr bool staged = kRows <= kStagedRows;
  static constexpr int threads = 32 * kWarps;
  static constexpr int registers = 4 * steps + 40;
  static constexpr int blocks = 65536 / (threads * ((registers + 7) / 8 * 8));  // that fit a multiprocessor
  static constexpr int partials = kWarps * kCluster;
};

template <int kRows, int kPartials>
struct GemvSums {  // of the block that writes the outputs, one partial sum for each warp of the cluster
  float products[kPartials][kRows][kTile];
  float squares[kPartials][kRows];
};

// The row of the weight whose products are output `column` of the tile.
template <Output kOutput>
__device__ inline long weight_row(int tile, int column, int n) {
  if (kOutput == Output::kGate) {
    const int at = tile * (kTile / 2) + column % (kTile / 2);
    return min(at, n - 1) + (column < kTile / 2 ? 0 : n);
  }
  return min(tile * kTile + column, n - 1);
}

template <class Shape, int kK>
__device__ inline void load_weights(Vec16 (&weights)[Shape::steps], const Bf16* row, int k) {
#pragma unroll
  for (int step = 0; step < Shape::steps; step++)
    weights[step] = Shape::whole || k + step * kStepK < kK ? load_once(row + k + step * kStepK) : Vec16{};
}

template <class Shape, int kK>
__device__ inline void copy_slice(Bf16* to, const Bf16* from, int first_k) {
#pragma unroll
  for (int start = 0; start < Shape::slice; start += 256) {
    const int k = start + threadIdx.x % 32 * 8;
    const bool inside = (start + 256 <= Shape::slice || k < Shape::slice) && (Shape::whole || first_k + k < kK);
    if (inside) copy_to_shared(to + k, from + first_k + k);
  }
}

// While the first blocks wait for their activations, they fetch the weights of those that will follow them.
template <Output kOutput, int kK, int kCluster>
__device__ inline void fetch_ahead(const GemvArgs& args, int tile, int rank) {
  const int next = tile + args.ahead, column = threadIdx.x;
  constexpr int outputs = kOutput == Output::kGate ? kTile / 2 : kTile;
  if (tile >= args.ahead || (next + 1) * outputs > args.n || column >= kTile || column % kCluster != rank) return;
  prefetch_to_l2(args.weight + weight_row<kOutput>(next, column, args.n) * kK, kK * 2);
}

__device__ inline float square_sum(unsigned pair) {
  return low_float(pair) * low_float(pair) + high_float(pair) * high_float(pair);
}

__device__ inline float square_sum(Vec16 v) {
  return square_sum(v.x) + square_sum(v.y) + square_sum(v.z) + square_sum(v.w);
}

// Up to 8 rows leave half of the instruction's rows free. These take every second pair of k: registers then need not be
// moved. Even accumulators count in their first rows, odd ones in their last.
__device__ inline Vec16 interleave(Vec16 v) { return {v.x, v.z, v.y, v.w}; }

__device__ inline void multiply_step(float (&sums)[kAccumulators][4], int step, Vec16 interleaved, Vec16 weight) {
  const Vec16 a = interleaved;
  multiply_add(sums[step * 2 % kAccumulators], a.x, a.y, a.z, a.w, weight.x, weight.y);
  multiply_add(sums[(step * 2 + 1) % kAccumulators], a.x, a.y, a.z, a.w, weight.z, weight.w);
}

// Add the accumulators up: the first two of sums[0] are the row's, with more than 8 rows the last two row + 8's.
template <int kRows>
__device__ inline void add_up(float (&sums)[kAccumulators][4]) {
  if (kRows <= 8) {
    for (int j = 0; j < 2; j++) sums[0][j] = (sums[0][j] + sums[2][j]) + (sums[1][j + 2] + sums[3][j + 2]);
  } else {
    for (int j = 0; j < 4; j++) sums[0][j] = (sums[0][j] + sums[2][j]) + (sums[1][j] + sums[3][j]);
  }
}

// Bring a warp's slice of the activations to shared memory, times the norm's weights. Returns this lane's part of each
// row's sum of squares.
template <class Shape, int kRows, int kK, bool kNorm>
__device__ inline void stage(const Bf16* x, int first_k, Bf16 (&staged)[kRows][Shape::slice], const Bf16* norm,
                             float (&squares)[kRows]) {
  constexpr int chunks = Shape::slice / 8, turns = (chunks + 31) / 32;
  const int lane = threadIdx.x % 32;
  Vec16 values[kRows][turns];
#pragma unroll
  for (int row = 0; row < kRows; row++)
#pragma unroll
    for (int turn = 0; turn < turns; turn++) {
      const int k = (turn * 32 + lane) * 8;
      const bool inside = k < Shape::slice && (Shape::whole || first_k + k < kK);
      values[row][turn] = inside ? load(x + row * kK + first_k + k) : Vec16{};
    }
#pragma unroll
  for (int row = 0; row < kRows; row++) {
    squares[row] = 0;
#pragma unroll
    for (int turn = 0; turn < turns; turn++) {
      const int k = (turn * 32 + lane) * 8;
      if (k >= Shape::slice) continue;
      Vec16 value = values[row][turn];
      if (kNorm) {
        squares[row] += square_sum(value);
        value = multiply(value, *reinterpret_cast<const Vec16*>(norm + k));
      }
      *reinterpret_cast<Vec16*>(&staged[row][k]) = interleave(value);
    }
#pragma unroll
    for (int step = 16; kNorm && step > 0; step /= 2)
      squares[row] += __shfl_xor_sync(~0u, squares[row], step);
  }
  __syncwarp();
}

// Multiply rows that are staged. Lanes whose row is beyond the last one compute what nobody reads.
template <class Shape, int kRows>
__device__ inline void multiply_staged(const Vec16 (&weights)[Shape::steps], const Bf16 (&staged)[kRows][Shape::slice],
                                       float (&sums)[kAccumulators][4]) {
  const int lane = threadIdx.x % 32;
  const Bf16* from = &staged[min(lane / 4, kRows - 1)][lane % 4 * 8];
#pragma unroll
  for (int step = 0; step < Shape::steps; step++)
    multiply_step(sums, step, *reinterpret_cast<const Vec16*>(from + step * kStepK), weights[step]);
}

// Multiply rows straight from the L1 cache, where blocks before this one have left them. Their squares come from the same
// instruction: the activations times themselves, of which each row's own column counts.
template <class Shape, int kRows, int kK, bool kNorm>
__device__ inline void multiply_direct(const Vec16 (&weights)[Shape::steps], const Bf16* x, int first_k,
                                       const Bf16* norm, float (&sums)[kAccumulators][4], float (&squares)[2][4]) {
  constexpr int halves = (kRows + 7) / 8, batch = halves == 1 ? 4 : 2;
  const int lane = threadIdx.x % 32;
  const int k = first_k + lane % 4 * 8;
#pragma unroll
  for (int start = 0; start < Shape::steps; start += batch) {
    Vec16 values[batch][halves] = {};
#pragma unroll
    for (int i = 0; i < batch && start + i < Shape::steps; i++)
#pragma unroll
      for (int half = 0; half < halves; half++) {
        const int row = min(half * 8 + lane / 4, kRows - 1), at = k + (start + i) * kStepK;
        if (Shape::whole || at < kK) values[i][half] = load(x + row * kK + at);
      }
#pragma unroll
    for (int i = 0; i < batch && start + i < Shape::steps; i++) {
      const int step = start + i;
      if (kNorm) {
        const Vec16 scale = *reinterpret_cast<const Vec16*>(norm + lane % 4 * 8 + step * kStepK);
#pragma unroll
        for (int half = 0; half < halves; half++) {
          Vec16& v = values[i][half];
          multiply_add(squares[half], v.x, v.z, v.y, v.w, v.x, v.y);
          multiply_add(squares[half], v.z, v.x, v.w, v.y, v.z, v.w);
          v = multiply(v, scale);
        }
      }
      const Vec16 a = values[i][0], c = values[i][halves - 1], b = weights[step];
      if constexpr (halves == 1) {
        multiply_step(sums, step, interleave(a), b);
      } else {
        multiply_add(sums[step * 2 % kAccumulators], a.x, c.x, a.y, c.y, b.x, b.y);
        multiply_add(sums[(step * 2 + 1) % kAccumulators], a.z, c.z, a.w, c.w, b.z, b.w);
      }
    }
  }
}

// Leave a warp's sums where the cluster's first block adds them up.
template <int kRows, int kPartials>
__device__ inline void leave_sums(GemvSums<kRows, kPartials>& all, int partial, const float (&sums)[4]) {
  const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < (kRows <= 8 ? 2 : 4); i++)
    if (row + i / 2 * 8 < kRows)
      store_in_cluster(address_in(0, &all.products[partial][row + i / 2 * 8][column + i % 2]), sums[i]);
}

// The diagonal of the squares: a row's own column.
template <int kRows, int kPartials>
__device__ inline void leave_squares(GemvSums<kRows, kPartials>& all, int partial, const float (&squares)[2][4]) {
  const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < (kRows + 7) / 8; half++)
    if (row / 2 == column / 2 && row + half * 8 < kRows)
      store_in_cluster(address_in(0, &all.squares[partial][row + half * 8]),
                       row % 2 ? squares[half][1] : squares[half][0]);
}

template <Output kOutput, int kRows, int kPartials, int kK, bool kNorm>
__device__ inline void write_outputs(const GemvArgs& args, const GemvSums<kRows, kPartials>& all, int tile) {
  for (int at = threadIdx.x; at < kRows * kTile; at += blockDim.x) {
    const int row = at / kTile, column = at % kTile;
    float value = 0, squares = 0;
    for (int i = 0; i < kPartials; i++) {
      value += all.products[i][row][column];
      if (kNorm) squares += all.squares[i][row];
    }
    if (kNorm) value *= rsqrtf(squares / kK + args.eps);
    int place = tile * kTile + column;
    if (kOutput == Output::kGate) {
      const float up = __shfl_down_sync(__activemask(), value, kTile / 2);
      if (column >= kTile / 2) continue;
      place = tile * (kTile / 2) + column;
      value = value / (1 + __expf(-value)) * up;
    }
    if (place >= args.n) continue;
    Bf16* out = args.out + long(row) * args.n + place;
    if (kOutput != Output::kGate && args.bias) value += to_float(args.bias[place]);
    if (kOutput == Output::kAdd) value += to_float(*out);
    *out = to_bf16(value);
  }
}

template <int kRows, int kK, int kWarps, int kCluster, Output kOutput, bool kNorm>
__global__ void __launch_bounds__(32 * kWarps, (GemvShape<kRows, kK, kWarps, kCluster>::blocks))
    gemv(const GemvArgs args) {
  using Shape = GemvShape<kRows, kK, kWarps, kCluster>;
  constexpr int staged_rows = Shape::staged ? kRows : 1;
  constexpr int staged_slice = Shape::staged ? Shape::slice : 8;
  __shared__ alignas(16) Bf16 staged[kWarps][staged_rows][staged_slice];
  __shared__ alignas(16) Bf16 norms[kWarps][kNorm ? Shape::slice : 8];
  __shared__ GemvSums<kRows, Shape::partials> all;

  const int rank = kCluster > 1 ? int(cluster_rank()) : 0;
  const int tile = blockIdx.x / kCluster, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int partial = rank * kWarps + warp, first_k = partial * Shape::slice;
  if (kCluster > 1) cluster_arrive();  // all blocks have started once all have waited, below

  Vec16 weights[Shape::steps];
  const Bf16* row = args.weight + weight_row<kOutput>(tile, lane / 4, args.n) * kK;
  load_weights<Shape, kK>(weights, row, first_k + lane % 4 * 8);
  if (kNorm)
    copy_slice<Shape, kK>(norms[warp], args.norm, first_k);
  launch_dependents();
  if (args.ahead > 0) fetch_ahead<kOutput, kK, kCluster>(args, tile, rank);
  if (kNorm) wait_for_copies();
  __syncwarp();
  wait_for_prerequisites();

  float sums[kAccumulators][4] = {};
  if constexpr (Shape::staged) {
    float squares[kRows];
    stage<Shape, kRows, kK, kNorm>(args.x, first_k, staged[warp], norms[warp], squares);
    multiply_staged<Shape, kRows>(weights, staged[warp], sums);
    if (kCluster > 1) cluster_wait();
    if (kNorm && lane == 0)
      for (int i = 0; i < kRows; i++) store_in_cluster(address_in(0, &all.squares[partial][i]), squares[i]);
  } else {
    float squares[2][4] = {};
    multiply_direct<Shape, kRows, kK, kNorm>(weights, args.x, first_k, norms[warp], sums, squares);
    if (kCluster > 1) cluster_wait();
    if (kNorm) leave_squares(all, partial, squares);
  }
  add_up<kRows>(sums);
  leave_sums(all, partial, sums[0]);
  if (kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  if (rank == 0) write_outputs<kOutput, kRows, Shape::partials, kK, kNorm>(args, all, tile);
}

}  // namespace blink
