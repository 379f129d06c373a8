// SPDX-License-Identifier: Apache-2.0
// The sum of what all ranks have computed, on each of them in the order of ranks, so that all have the same bits. Where
// a norm follows, the sum is added to the residual, and the norm of that is written. Blocks are few enough to run all
// at once: each sends all of its lines before it waits for any.
#include "kernels/comm/exchange.cuh"
#include "kernels/comm/packs.cuh"
#include "region/codes.h"

namespace blink {

template <class T>
constexpr bool is_void = false;
template <>
constexpr bool is_void<void> = true;

// The sum of all ranks' numbers of a line, rounded after each addition.
template <class T>
__device__ inline Pack<T> sum_line(Exchange& exchange, int line, Pack<T> own) {
  Pack<T> total = own;
  for (int rank = 0; rank < exchange.size(); rank++) {
    Pack<T> part = own;
    if (rank != exchange.rank()) part.data = exchange.receive(rank, line);
    total = rank == 0 ? part : add(total, part);
  }
  return total;
}

// The sum over all threads of a block.
__device__ inline float sum_over_block(float value) {
  __shared__ float sums[kThreads / 32];
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  __syncthreads();  // those of the row before have been read
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  for (const float sum : sums) value += sum;
  return value;
}

// Write the norm of a row of the residual, which this block has just written.
template <class T, class Norm>
__device__ inline void write_norm(const AllReduceArgs& args, int row, float square_sum) {
  const float rate = rsqrtf(sum_over_block(square_sum) / args.width + args.eps);
  const auto* norm = static_cast<const Norm*>(args.norm);
  for (int column = threadIdx.x * Pack<T>::kCount; column < args.width; column += kThreads * Pack<T>::kCount) {
    const long at = long(row) * args.width + column;
    Pack<T> pack = load_pack<T>(args.residual, at, args.count);
#pragma unroll
    for (int i = 0; i < Pack<T>::kCount; i++)
      pack.values[i] = round_to<T>(to_float(pack.values[i]) * rate * to_float(norm[column + i]));
    store_pack(args.out, at, args.count, pack);
  }
}

// Grid: at most as many blocks as run at once. Norm: what the norm's weights are, void for none; then the width is a
// multiple of a line's numbers.
template <class T, class Norm>
__global__ void __launch_bounds__(kThreads, 1) all_reduce(const AllReduceArgs args) {
  launch_dependents();
  wait_for_prerequisites();
  Exchange exchange(args.ranks);
  constexpr bool kNorm = !is_void<Norm>;
  constexpr int kStep = kThreads * Pack<T>::kCount;
  const int rows = (args.count + args.width - 1) / args.width;
  const int lines = (args.width + Pack<T>::kCount - 1) / Pack<T>::kCount;
  const int first = threadIdx.x * Pack<T>::kCount;
  for (int row = blockIdx.x; row < rows; row += gridDim.x)
    for (int column = first; column < args.width; column += kStep) {
      const Pack<T> own = load_pack<T>(args.partial, long(row) * args.width + column, args.count);
      exchange.send_to_all(row * lines + column / Pack<T>::kCount, own.data);
    }
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    float square_sum = 0;
    for (int column = first; column < args.width; column += kStep) {
      const long at = long(row) * args.width + column;
      const Pack<T> own = load_pack<T>(args.partial, at, args.count);
      Pack<T> total = sum_line(exchange, row * lines + column / Pack<T>::kCount, own);
      if constexpr (kNorm) {
        total = add(total, load_pack<T>(args.residual, at, args.count));
        for (const T value : total.values) square_sum += to_float(value) * to_float(value);
      }
      store_pack(kNorm ? args.residual : args.out, at, args.count, total);
    }
    if constexpr (kNorm) write_norm<T, Norm>(args, row, square_sum);
  }
}

// Put a line of a rank's columns where it belongs among those of all ranks.
template <class T>
__device__ inline void place_pack(const JoinArgs& args, int from, int line, Pack<T> pack) {
  const int start = args.starts[from], width = args.starts[from + 1] - start, all = args.starts[args.ranks.size];
#pragma unroll
  for (int i = 0; i < Pack<T>::kCount; i++) {
    const int at = line * Pack<T>::kCount + i;
    if (at < args.rows * width) static_cast<T*>(args.out)[long(at / width) * all + start + at % width] = pack.values[i];
  }
}

// Collect all ranks' columns on the first rank. All others get one line of each rank, whose data is nothing: it says
// that the rank has read what exchanges before have brought.
template <class T>
__global__ void __launch_bounds__(kThreads, 1) join(const JoinArgs args) {
  launch_dependents();
  wait_for_prerequisites();
  Exchange exchange(args.ranks);
  const int rank = exchange.rank(), begin = blockIdx.x * kThreads + threadIdx.x, step = gridDim.x * kThreads;
  const auto count_of = [&](int of) { return (args.starts[of + 1] - args.starts[of]) * args.rows; };
  const auto lines_of = [&](int of) { return (count_of(of) + Pack<T>::kCount - 1) / Pack<T>::kCount; };
  if (begin == 0)
    for (int to = 1; to < exchange.size(); to++)
      if (to != rank) exchange.send(to, 0, make_uint2(0, 0));
  for (int line = begin; line < lines_of(rank); line += step) {
    const Pack<T> own = load_pack<T>(args.part, long(line) * Pack<T>::kCount, count_of(rank));
    if (rank == 0)
      place_pack(args, 0, line, own);
    else
      exchange.send(0, line, own.data);
  }
  for (int from = 0; from < exchange.size(); from++) {
    if (from == rank) continue;
    const int lines = rank == 0 ? lines_of(from) : 1;
    for (int line = begin; line < lines; line += step) {
      Pack<T> pack;
      pack.data = exchange.receive(from, line);
      if (rank == 0) place_pack(args, from, line, pack);
    }
  }
}

// Count a step's exchanges, and tell the scheduler of a rank that did not come to one. The last kernel but the mark
// that the step is done; one thread.
template <int kThreadsOfOne>
__global__ void end_step(const EndStepArgs args) {
  static_assert(kThreadsOfOne == 1);
  wait_for_prerequisites();
  auto& words = *reinterpret_cast<volatile RankWords*>(args.ranks.boxes[args.ranks.rank]);
  words.epoch = words.epoch + args.ranks.op;
  if (words.lost != 0) *args.failed = kFirstLostRank + words.lost - 1;
}

}  // namespace blink
