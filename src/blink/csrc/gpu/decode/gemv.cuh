// SPDX-License-Identifier: Apache-2.0
// Products of a few rows of activations with a weight [out, in], for decoding. A cluster of blocks computes a tile of
// outputs of all rows; its warps split k, and all weights of a block are on their way to registers before it waits for
// the activations. The norm before and the residual or activation behind the product are part of it.
#pragma once

#include "ptx.cuh"

namespace blink {

enum class Output { kStore, kAdd, kGate };  // out = product + bias; out += product + bias; silu(gate) * up

struct GemvArgs {
  const Bf16* weight;  // [n, k]; kGate: [2 * n, k], gates first
  const Bf16* bias;    // [n] or null
  const Bf16* x;       // [rows, k]
  const Bf16* norm;    // [k], with kNorm
  Bf16* out;           // [rows, n], n at least a tile's outputs
  float eps;
  int n;
  int ahead, fetched;  // the first `fetched` tiles bring those `ahead` of them to L2 while they wait
};

// How a tile's products are laid out. One load of a warp takes 32 * kSlices consecutive k of 8 / kSlices weight rows, so
// that whole lines are read; to the matrix instruction these are 8 columns of 32 k, and the activations' slices are as
// many rows. Of its 16 rows x 8 columns, only those of the same slice count.
template <int kRows, int kK, int kWarps, int kCluster, int kSlices, int kTile, Output kOutput>
struct GemvShape {
  // Few rows leave half of the instruction's rows free; these then take every second pair of k.
  static constexpr bool folded = kRows * kSlices <= 8;
  static constexpr int slots = (folded ? 8 : 16) / kSlices;  // rows of one slice
  static constexpr int span = 32 * kSlices;                  // k of a load
  static constexpr int group = 8 / kSlices;                  // weight rows of a load
  static constexpr int groups = kTile / group;
  static constexpr int steps = (kK + span * kWarps * kCluster - 1) / (span * kWarps * kCluster);
  static constexpr int slice = steps * span;  // k of a warp
  static constexpr bool whole = slice * kWarps * kCluster == kK;  // no lane's k is beyond the end
  static constexpr int outputs = kOutput == Output::kGate ? kTile / 2 : kTile;
  static constexpr int registers = (4 * groups * steps + 40 + 7) / 8 * 8;
  static constexpr int blocks = 65536 / (32 * kWarps * registers);  // that fit a multiprocessor
  static constexpr int partials = kWarps * kCluster;
  static constexpr int stride = slice + 32;  // of staged rows, padded against bank conflicts
  static_assert(kRows <= slots && slots <= 8 && groups * group == kTile);
};

template <int kRows, int kTile, int kPartials>
struct GemvSums {  // of the block that writes the outputs, one partial sum for each warp of the cluster
  float products[kPartials][kRows][kTile];
  float squares[kPartials][kRows];
};

template <class Shape, int kRows, int kWarps, int kTile>
struct GemvShared {  // the norm's weights follow, with kNorm
  alignas(16) Bf16 staged[kWarps][kRows][Shape::stride];
  GemvSums<kRows, kTile, Shape::partials> sums;
};

// Address of a lane's first weights. The last tile ends with the last output, some of which two tiles then compute.
template <class Shape, int kK>
__device__ inline const Bf16* first_weight(const GemvArgs& args, int tile, int first_k) {
  const int lane = threadIdx.x % 32, column = lane / 4;
  const int row = min(tile * Shape::outputs, args.n - Shape::outputs) + column % Shape::group;
  return args.weight + long(row) * kK + first_k + column / Shape::group * 32 + lane % 4 * 8;
}

template <class Shape, Output kOutput, int kK>
__device__ inline void load_weights(const GemvArgs& args, const Bf16* first, int first_k,
                                    Vec16 (&weights)[Shape::groups][Shape::steps]) {
  const int lane = threadIdx.x % 32;
  const int k = first_k + lane / 4 / Shape::group * 32 + lane % 4 * 8;
#pragma unroll
  for (int group = 0; group < Shape::groups; group++) {
    const Bf16* row = first + long(group * Shape::group) * kK;
    // The second half of a gated tile stands n rows further on.
    constexpr int half = Shape::outputs;
    if (kOutput == Output::kGate) {
      const int in_tile = group * Shape::group + (Shape::group > half ? lane / 4 % Shape::group : 0);
      if (in_tile >= half) row += long(args.n - half) * kK;
    }
#pragma unroll
    for (int step = 0; step < Shape::steps; step++)
      weights[group][step] =
          Shape::whole || k + step * Shape::span < kK ? load_once(row + step * Shape::span) : Vec16{};
  }
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

// Bring later tiles' weights to L2, once this block's own have come: what it waits for else is not memory.
template <class Shape, int kK>
__device__ inline void fetch_ahead(const GemvArgs& args, int tile, int rank, const Vec16& last) {
  const int next = tile + args.ahead, row = threadIdx.x;
  if (tile >= args.fetched || (next + 1) * Shape::outputs > args.n) return;
  asm volatile("" ::"r"(last.x), "r"(last.y), "r"(last.z), "r"(last.w) : "memory");
  if (row >= Shape::groups * Shape::group || rank != 0) return;
  const int place = next * Shape::outputs + row % Shape::outputs + (row < Shape::outputs ? 0 : args.n);
  prefetch_to_l2(args.weight + long(place) * kK, kK * 2);
}

__device__ inline float square_sum(unsigned pair) {
  return low_float(pair) * low_float(pair) + high_float(pair) * high_float(pair);
}

__device__ inline float square_sum(Vec16 v) {
  return square_sum(v.x) + square_sum(v.y) + square_sum(v.z) + square_sum(v.w);
}

// Bring a warp's slice of the activations to shared memory, times the norm's weights. Returns each row's sum of squares
// over the slice.
template <class Shape, int kRows, int kK, bool kNorm>
__device__ inline void stage(const Bf16* x, int first_k, Bf16 (&staged)[kRows][Shape::stride], const Bf16* norm,
                             float (&squares)[kRows]) {
  constexpr int turns = (Shape::slice / 8 + 31) / 32;
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
      Vec16 v = values[row][turn];
      if (kNorm) {
        squares[row] += square_sum(v);
        v = multiply(v, *reinterpret_cast<const Vec16*>(norm + k));
      }
      *reinterpret_cast<Vec16*>(&staged[row][k]) = Shape::folded ? Vec16{v.x, v.z, v.y, v.w} : v;
    }
#pragma unroll
    for (int step = 16; kNorm && step > 0; step /= 2) squares[row] += __shfl_xor_sync(~0u, squares[row], step);
  }
  __syncwarp();
}

// The products of one group of weight rows with a warp's slice: two outputs a lane, of which lanes with the same row and
// output hold parts. Lanes whose row is beyond the last one compute what nobody reads.
template <class Shape, int kRows>
__device__ inline void multiply_group(const Vec16 (&weights)[Shape::steps],
                                      const Bf16 (&staged)[kRows][Shape::stride], float (&products)[2]) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  const Bf16* low = &staged[min(row % Shape::slots, kRows - 1)][row / Shape::slots * 32 + lane % 4 * 8];
  constexpr int high = Shape::folded ? 0 : 8 / Shape::slots * 32;  // from row to row + 8
  float first[4] = {}, second[4] = {};
#pragma unroll
  for (int step = 0; step < Shape::steps; step++) {
    const Vec16 a = *reinterpret_cast<const Vec16*>(low + step * Shape::span), b = weights[step];
    if constexpr (Shape::folded) {
      multiply_add(first, a.x, a.y, a.z, a.w, b.x, b.y);
      multiply_add(second, a.x, a.y, a.z, a.w, b.z, b.w);
    } else {
      const Vec16 c = *reinterpret_cast<const Vec16*>(low + step * Shape::span + high);
      multiply_add(first, a.x, c.x, a.y, c.y, b.x, b.y);
      multiply_add(second, a.z, c.z, a.w, c.w, b.z, b.w);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int slice = (lane % 4 * 2 + i) / Shape::group;
    if constexpr (Shape::folded) {
      products[i] = row / Shape::slots == slice ? first[i] + second[i + 2] : 0;
    } else {
      products[i] = row / Shape::slots == slice ? first[i] + second[i] : 0;
      products[i] += (row + 8) / Shape::slots == slice ? first[i + 2] + second[i + 2] : 0;
    }
  }
}

// Add up what lanes hold of the same outputs, and leave it where the cluster's first block adds up all warps' sums.
template <class Shape, int kRows, int kTile, int kPartials>
__device__ inline void leave_products(GemvSums<kRows, kTile, kPartials>& all, int partial, int group,
                                      float (&products)[2]) {
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
  if (Shape::group == 1) products[0] += products[1];
  constexpr int values = Shape::group == 1 ? 1 : 2;
#pragma unroll
  for (int i = 0; i < values; i++) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
      if (step * 2 >= Shape::group) products[i] += __shfl_xor_sync(~0u, products[i], step);
#pragma unroll
    for (int step = 4 * Shape::slots; step < 32; step *= 2) products[i] += __shfl_xor_sync(~0u, products[i], step);
    if (row < kRows && row < Shape::slots && column < (Shape::group == 1 ? 2 : Shape::group))
      store_in_cluster(address_in(0, &all.products[partial][row][group * Shape::group + column + i]), products[i]);
  }
}

template <class Shape, Output kOutput, int kRows, int kTile, int kPartials, int kK, bool kNorm>
__device__ inline void write_outputs(const GemvArgs& args, const GemvSums<kRows, kTile, kPartials>& all, int tile) {
  const int first = min(tile * Shape::outputs, args.n - Shape::outputs);
  for (int at = threadIdx.x; at < kRows * Shape::outputs; at += blockDim.x) {
    const int row = at / Shape::outputs, column = at % Shape::outputs, place = first + column;
    if (place < tile * Shape::outputs) continue;  // the tile before writes it
    float value = 0, up = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < kPartials; i++) {
      value += all.products[i][row][column];
      if (kOutput == Output::kGate) up += all.products[i][row][column + Shape::outputs];
      if (kNorm) squares += all.squares[i][row];
    }
    const float rate = kNorm ? rsqrtf(squares / kK + args.eps) : 1;
    value *= rate;
    if (kOutput == Output::kGate) value = value / (1 + __expf(-value)) * up * rate;
    Bf16* out = args.out + long(row) * args.n + place;
    if (kOutput != Output::kGate && args.bias) value += to_float(args.bias[place]);
    if (kOutput == Output::kAdd) value += to_float(*out);
    *out = to_bf16(value);
  }
}

template <int kRows, int kK, int kWarps, int kCluster, int kSlices, int kTile, Output kOutput, bool kNorm>
__global__ void
__launch_bounds__(32 * kWarps, (GemvShape<kRows, kK, kWarps, kCluster, kSlices, kTile, kOutput>::blocks))
    gemv(const GemvArgs args) {
  using Shape = GemvShape<kRows, kK, kWarps, kCluster, kSlices, kTile, kOutput>;
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<GemvShared<Shape, kRows, kWarps, kTile>*>(memory);

  launch_dependents();
  const int rank = kCluster > 1 ? int(cluster_rank()) : 0;
  const int tile = blockIdx.x / kCluster, warp = threadIdx.x / 32;
  const int partial = rank * kWarps + warp, first_k = partial * Shape::slice;
  Bf16* norms = reinterpret_cast<Bf16*>(memory + sizeof(shared)) + warp * Shape::slice;
  if (kCluster > 1) cluster_arrive();  // all blocks have started once all have waited, below

  Vec16 weights[Shape::groups][Shape::steps];
  load_weights<Shape, kOutput, kK>(args, first_weight<Shape, kK>(args, tile, first_k), first_k, weights);
  if (kNorm) copy_slice<Shape, kK>(norms, args.norm, first_k);
  if (args.fetched > 0) fetch_ahead<Shape, kK>(args, tile, rank, weights[Shape::groups - 1][Shape::steps - 1]);
  if (kNorm) wait_for_copies();
  __syncwarp();
  wait_for_prerequisites();

  float squares[kRows];
  stage<Shape, kRows, kK, kNorm>(args.x, first_k, shared.staged[warp], norms, squares);
  if (kCluster > 1) cluster_wait();
#pragma unroll
  for (int group = 0; group < Shape::groups; group++) {
    float products[2];
    multiply_group<Shape, kRows>(weights[group], shared.staged[warp], products);
    leave_products<Shape>(shared.sums, partial, group, products);
  }
  if (kNorm && threadIdx.x % 32 == 0)
    for (int row = 0; row < kRows; row++) store_in_cluster(address_in(0, &shared.sums.squares[partial][row]), squares[row]);
  if (kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  if (rank == 0) write_outputs<Shape, kOutput, kRows, kTile, Shape::partials, kK, kNorm>(args, shared.sums, tile);
}

}  // namespace blink
