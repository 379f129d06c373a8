// SPDX-License-Identifier: Apache-2.0
// The all-reduce of few rows, with residual and norm: a cluster of blocks has a row, and a thread a line of it or some.
// The bits of the sum are those of all_reduce.cu; the sum of the norm is made in the same order on all ranks.
//
// What no kernel of a step writes is loaded before the wait: the norm's weights, the boxes' addresses and the number
// of the exchange. The numbers of a thread stay in its registers. All blocks of the grid run at once: each sends all
// of its lines before it waits for any.
#include "kernels/comm/exchange.cuh"
#include "kernels/comm/packs.cuh"

namespace blink {

constexpr int kSpreadWarps = kSpreadThreads / 32;
constexpr int kMostPolled = 8;  // lines of other ranks that a thread polls together

template <int kCluster>
struct SpreadShared {
  float sums[kCluster][kSpreadWarps];  // from all warps of the cluster
  alignas(8) Barrier exchanged;
};

// Get ready for the sums of the cluster; cluster_wait() follows, before a sum is sent.
template <int kCluster>
__device__ inline void prepare(SpreadShared<kCluster>& shared) {
  if (threadIdx.x == 0) {
    initialize(shared.exchanged, 1);
    expect(shared.exchanged, sizeof(shared.sums));
    publish_barriers();
  }
  __syncthreads();
  cluster_arrive_relaxed();
}

// The sum over all threads of a cluster, on each of them.
template <int kCluster>
__device__ inline float sum_over_cluster(float value, SpreadShared<kCluster>& shared) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  cluster_wait();
  const int lane = threadIdx.x % 32;
  if (lane < kCluster) send<kCluster>(lane, value, shared.sums[cluster_rank()][threadIdx.x / 32], shared.exchanged);
  receive<kCluster>(shared.exchanged);
  float sums[4] = {};  // which do not wait for each other
#pragma unroll
  for (int i = 0; i < kCluster * kSpreadWarps; i++) sums[i % 4] += shared.sums[i / kSpreadWarps][i % kSpreadWarps];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// The weights of a norm for one line, in words until they are used.
template <class T, class Norm>
union NormLine {
  static constexpr int kWords = sizeof(Norm) * Pack<T>::kCount / 4;
  struct alignas(4 * kWords) Words {
    unsigned words[kWords];
  } words;
  Norm values[Pack<T>::kCount];
};

// One thread's lines of a row: kLines, of which those that lie in the row count.
template <class T, class Norm, int kRanks, int kCluster, int kLines>
struct SpreadRow {
  using Line = NormLine<T, Norm>;
  static constexpr int kOthers = kRanks - 1, kStep = kCluster * kSpreadThreads;
  static constexpr int kAtOnce = kOthers * kLines <= kMostPolled ? kLines : 1;

  // Before the wait: what no kernel of the step writes.
  __device__ SpreadRow(const AllReduceArgs& args, const Exchange& exchange)
      : lines(args.width / Pack<T>::kCount), place(cluster_rank() * kSpreadThreads + threadIdx.x) {
    start = blockIdx.x / kCluster * lines;
#pragma unroll
    for (int i = 0; i < kOthers; i++) outboxes[i] = exchange.lines(exchange.other(i), exchange.rank()) + start;
    inbox = exchange.lines(exchange.rank(), 0) + start;
#pragma unroll
    for (int i = 0; i < kLines; i++)
      if (has(i)) norm[i] = static_cast<const typename Line::Words*>(args.norm)[at(i)];
  }

  __device__ int at(int i) const { return place + i * kStep; }  // in the row
  __device__ bool has(int i) const { return at(i) < lines; }

  // After the wait.
  __device__ void load_and_send(const AllReduceArgs& args, const Exchange& exchange) {
#pragma unroll
    for (int i = 0; i < kLines; i++)
      if (has(i)) own[i] = static_cast<const uint2*>(args.partial)[start + at(i)];
#pragma unroll
    for (int i = 0; i < kLines; i++)
      if (has(i)) residual[i] = static_cast<const uint2*>(args.residual)[start + at(i)];
#pragma unroll
    for (int i = 0; i < kLines; i++)
#pragma unroll
      for (int to = 0; to < kOthers; to++)
        if (has(i)) store_line(outboxes[to] + at(i), own[i], exchange.number());
  }

  // Add all ranks' numbers in their order, then the residual; return what the norm's sum gets.
  __device__ float receive_and_add(Exchange& exchange) {
    float square_sum = 0;
#pragma unroll
    for (int first = 0; first < kLines; first += kAtOnce) {
      uint2 parts[kAtOnce][kOthers];
      exchange.receive<kOthers, kAtOnce>(inbox, at(first), kStep, lines, parts);
#pragma unroll
      for (int i = first; i < first + kAtOnce; i++) {
        if (!has(i)) continue;
        const Pack<T> total = add(sum_ranks(parts[i - first], Pack<T>{own[i]}, exchange.rank()), Pack<T>{residual[i]});
        residual[i] = total.data;
#pragma unroll
        for (int j = 0; j < Pack<T>::kCount; j++) square_sum += to_float(total.values[j]) * to_float(total.values[j]);
      }
    }
    return square_sum;
  }

  static __device__ Pack<T> sum_ranks(const uint2 (&others)[kOthers], Pack<T> own, int own_rank) {
    Pack<T> total = own;
#pragma unroll
    for (int rank = 0; rank < kRanks; rank++) {
      Pack<T> part = own;
      if (rank < own_rank) part.data = others[rank < kOthers ? rank : 0];
      if (rank > own_rank) part.data = others[rank > 0 ? rank - 1 : 0];
      total = rank == 0 ? part : add(total, part);
    }
    return total;
  }

  __device__ void write(const AllReduceArgs& args, float rate) const {
#pragma unroll
    for (int i = 0; i < kLines; i++) {
      if (!has(i)) continue;
      static_cast<uint2*>(args.residual)[start + at(i)] = residual[i];
      Pack<T> pack{residual[i]};
      const Line weights{norm[i]};
#pragma unroll
      for (int j = 0; j < Pack<T>::kCount; j++)
        pack.values[j] = round_to<T>(to_float(pack.values[j]) * rate * to_float(weights.values[j]));
      static_cast<uint2*>(args.out)[start + at(i)] = pack.data;
    }
  }

  int lines, place, start;  // of the row; of this thread's first in the row; of the row's first
  uint4* outboxes[kOthers];
  const uint4* inbox;
  typename Line::Words norm[kLines];
  uint2 own[kLines], residual[kLines];  // then the sum of both
};

template <class T, class Norm, int kRanks, int kCluster, int kLines>
__device__ inline void reduce_row(const AllReduceArgs& args, SpreadShared<kCluster>& shared) {
  launch_dependents();
  prepare(shared);
  Exchange exchange(args.ranks);
  SpreadRow<T, Norm, kRanks, kCluster, kLines> row(args, exchange);
  wait_for_prerequisites();
  row.load_and_send(args, exchange);
  const float square_sum = sum_over_cluster(row.receive_and_add(exchange), shared);
  row.write(args, rsqrtf(square_sum / args.width + args.eps));
}

// Grid: a cluster for each row, all of which run at once. Norm: what the norm's weights are. The width is a multiple of
// a line's numbers.
template <class T, class Norm, int kRanks, int kCluster, int kLines>
__global__ void __launch_bounds__(kSpreadThreads, 2) all_reduce_spread(const AllReduceArgs args) {
  __shared__ SpreadShared<kCluster> shared;
  reduce_row<T, Norm, kRanks, kCluster, kLines>(args, shared);
}

}  // namespace blink
