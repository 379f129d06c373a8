// SPDX-License-Identifier: Apache-2.0
// The sum of what all ranks have computed, of large matrices: each rank adds up a part of it, and all get all parts. So
// a rank sends no number twice to the same other, however many ranks there are. The order of the sums, and so their
// bits, are those of all_reduce.cu.
//
// Numbers lie in units, of one pack for each thread of a block. A rank's part is a range of units, of which each block
// has every gridDim.x-th, in all parts and on all ranks alike.
#include "kernels/comm/exchange.cuh"
#include "kernels/comm/packs.cuh"

namespace blink {

constexpr int kSummands = 0, kSums = 1;  // phases
constexpr int kBatch = 8;                // units whose loads are under way together

// A rank's part, as one block has it.
template <class T>
struct Part {
  static constexpr int kUnit = kThreads * Pack<T>::kCount;

  __device__ Part(int count, int size, int rank) {
    const int units = (count + kUnit - 1) / kUnit, most = (units + size - 1) / size;
    begin = min(rank * most, units);
    own = (min(begin + most, units) - begin - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);
  }
  __device__ int unit(int i) const { return blockIdx.x + i * gridDim.x; }         // in the part
  __device__ int piece(int i) const { return unit(i) * kThreads + threadIdx.x; }  // of this thread
  __device__ long number(int i) const { return long(begin + unit(i)) * kUnit + threadIdx.x * Pack<T>::kCount; }

  int begin;  // the part's first unit
  int own;    // units of this block
};

// For each of a block's units of a part: get a pack, some of them at once, then put it.
template <class T, class Get, class Put>
__device__ inline void move(int count, Get get, Put put) {
  for (int first = 0; first < count; first += kBatch) {
    Pack<T> packs[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; i++)
      if (first + i < count) packs[i] = get(first + i);
#pragma unroll
    for (int i = 0; i < kBatch; i++)
      if (first + i < count) put(first + i, packs[i]);
  }
}

template <class T>
__device__ inline Pack<T> load_piece(const uint2* pieces, int at) {
  Pack<T> pack;
  pack.data = pieces[at];
  return pack;
}

// Store the sums of this rank's part in all boxes.
template <class T>
__device__ inline void add_up(const TwoShotArgs& args, Exchange& exchange) {
  const int size = exchange.size(), rank = exchange.rank();
  const Part<T> part(args.count, size, rank);
  const auto load = [&](int from, int i) {
    if (from == rank) return load_pack<T>(args.partial, part.number(i), args.count);
    return load_piece<T>(exchange.pieces(rank, kSummands, from), part.piece(i));
  };
  for (int first = 0; first < part.own; first += kBatch) {
    Pack<T> totals[kBatch];
    for (int from = 0; from < size; from++) {
      Pack<T> packs[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; i++)
        if (first + i < part.own) packs[i] = load(from, first + i);
#pragma unroll
      for (int i = 0; i < kBatch; i++) totals[i] = from == 0 ? packs[i] : add(totals[i], packs[i]);
    }
    for (int to = 0; to < size; to++) {
      uint2* pieces = exchange.pieces(to, kSums, rank);
#pragma unroll
      for (int i = 0; i < kBatch; i++)
        if (first + i < part.own) pieces[part.piece(first + i)] = totals[i].data;
    }
  }
}

// Grid: at most kMostBlocks, and as many on all ranks.
template <class T>
__global__ void __launch_bounds__(kThreads, 1) two_shot(const TwoShotArgs args) {
  launch_dependents();
  wait_for_prerequisites();
  Exchange exchange(args.ranks);
  const int size = exchange.size(), rank = exchange.rank();
  for (int i = 1; i < size; i++) {
    const int to = (rank + i) % size;
    const Part<T> part(args.count, size, to);
    uint2* pieces = exchange.pieces(to, kSummands, rank);
    move<T>(
        part.own, [&](int i) { return load_pack<T>(args.partial, part.number(i), args.count); },
        [&](int i, Pack<T> pack) { pieces[part.piece(i)] = pack.data; });
  }
  exchange.meet(kSummands);
  add_up<T>(args, exchange);
  exchange.meet(kSums);
  for (int from = 0; from < size; from++) {
    const Part<T> part(args.count, size, from);
    const uint2* pieces = exchange.pieces(rank, kSums, from);
    move<T>(
        part.own, [&](int i) { return load_piece<T>(pieces, part.piece(i)); },
        [&](int i, Pack<T> pack) { store_pack(args.out, part.number(i), args.count, pack); });
  }
}

}  // namespace blink
