// SPDX-License-Identifier: Apache-2.0
// What is asked of a row of logits beyond the largest: a token drawn from it, and its best logprobs. A cluster has one
// row, which its blocks share out and keep in shared memory. The same row gives the same, whatever runs beside it.
#include "draw.cuh"
#include "gpu/args.h"
#include "logprobs.cuh"

namespace blink {

constexpr int kHeadBytes = 11776;  // of shared memory, before a row
static_assert(kHeadBytes % 16 == 0 && sizeof(RowShared) % 16 == 0 && sizeof(RowShared) + sizeof(Best) <= kHeadBytes);

template <class T, int kThreads>
__device__ void draw_token(const SampleArgs& args, uint64_t row, const SlotParams& slot, RowShared& shared, T* staged) {
  const Sampling& p = slot.sampling;
  const bool changed = args.changed[row] != 0;
  RowPart<T> part((changed ? args.width : args.vocab_size) / 4, staged);
  if (changed)
    part.keep_outside(args.scaled + row * args.width);
  else
    part.template stage<kThreads>(static_cast<const T*>(args.logits) + row * args.stride);
  const float factor = changed ? 1 : 1 / p.temperature;
  const Extremes extremes = find_extremes<T, kThreads>(shared, part);
  Winner winner{extremes.largest, 0};
  if (is_finite(extremes.largest)) {
    const float floor = find_floor<T, kThreads>(shared, part, extremes, factor, p);
    winner = Draw<T, kThreads>(shared, part, extremes.largest, factor).run(floor, uint32_t(args.context_lens[row]), p);
  }
  if (cluster_rank() > 0) return;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < args.num_parts; i += kThreads) {
    args.best[row * args.num_parts + i] = i == 0 ? winner.value : -kInfinity;
    args.tokens[row * args.num_parts + i] = i == 0 ? int32_t(winner.token) : 0;
  }
}

template <class T, int kThreads>
__device__ void find_logprobs(const SampleArgs& args, uint64_t row, uint32_t wanted, RowShared& shared, Best& best,
                              T* staged) {
  RowPart<T> part(args.vocab_size / 4, staged);
  part.template stage<kThreads>(static_cast<const T*>(args.logits) + row * args.stride);
  const Extremes extremes = find_extremes<T, kThreads>(shared, part);
  if (!is_finite(extremes.largest)) return;  // nothing is sampled
  Ranking<T, kThreads> ranking(shared, best, part, extremes);
  const float mass = ranking.add_masses();
  if (wanted > 0) ranking.find(wanted);
  if (cluster_rank() > 0) return;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < args.num_parts; i += kThreads) {
    args.largest[row * args.num_parts + i] = i == 0 ? extremes.largest : -kInfinity;
    args.mass[row * args.num_parts + i] = i == 0 ? mass : 0;
  }
  write_best(best, wanted, extremes.largest + logf(mass), args.top_tokens + row * kMaxLogprobs,
             args.top_logprobs + row * kMaxLogprobs);
}

// grid: (kRowCluster, 2 * rows), clusters of one row and one task.
// Shared memory: RowShared, Best, and from kHeadBytes on a block's part of a row of T.
template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads > 256 ? 1 : 4) sample_rows(const SampleArgs args) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<RowShared*>(memory);
  auto& best = *reinterpret_cast<Best*>(memory + sizeof(RowShared));
  T* staged = reinterpret_cast<T*>(memory + kHeadBytes);
  launch_dependents();
  cluster_arrive_relaxed();  // all blocks have started once all have waited: they write to one another
  wait_for_prerequisites();
  cluster_wait();
  const uint64_t row = blockIdx.y / 2;
  if (row >= args.header->num_rows) return;
  const SlotParams& slot = args.params[args.row_slots[row]];
  const Sampling& p = slot.sampling;
  if (blockIdx.y % 2 > 0) {
    if (p.num_logprobs >= 0 && args.top_tokens)
      find_logprobs<T, kThreads>(args, row, uint32_t(p.num_logprobs), shared, best, staged);
  } else if (p.temperature >= kGreedyTemperature) {
    draw_token<T, kThreads>(args, row, slot, shared, staged);
  }
}

}  // namespace blink
