// SPDX-License-Identifier: Apache-2.0
// What is asked of a row of logits beyond the largest: a token drawn from it, and its best logprobs. A cluster has one
// row, which its blocks share out and keep in shared memory. The same row gives the same, whatever runs beside it.
#include "cluster_row.cuh"
#include "gpu/args.h"
#include "sampler/sample.h"

namespace blink {

constexpr int kHeadBytes = 11776;  // of shared memory, before a row
constexpr int kMostThreads = 1024;
static_assert(kHeadBytes % 16 == 0 && sizeof(RowShared<ClusterGroup<kMostThreads>>) + sizeof(Best) <= kHeadBytes);

template <class Group, class T>
__device__ void draw_one(const Group& group, const SampleArgs& args, uint64_t row, const Sampling& p,
                         RowShared<Group>& shared, T* staged) {
  const bool changed = args.changed[row] != 0;
  RowPart<T> part(group, (changed ? args.width : args.vocab_size) / 4, staged);
  if (changed)
    part.keep_outside(args.scaled + row * args.width);
  else
    part.stage(group, static_cast<const T*>(args.logits) + row * args.stride);
  const float factor = changed ? 1 : 1 / p.temperature;
  const Winner winner = draw_token(group, shared, part, factor, uint32_t(args.context_lens[row]), p);
  if (group.block() > 0) return;
#pragma unroll 1
  for (uint32_t i = group.thread(); i < args.num_parts; i += Group::kThreads) {
    args.best[row * args.num_parts + i] = i == 0 ? winner.value : -kInfinity;
    args.tokens[row * args.num_parts + i] = i == 0 ? int32_t(winner.token) : 0;
  }
}

template <class Group, class T>
__device__ void find_logprobs(const Group& group, const SampleArgs& args, uint64_t row, uint32_t wanted,
                              RowShared<Group>& shared, Best& best, T* staged) {
  RowPart<T> part(group, args.vocab_size / 4, staged);
  part.stage(group, static_cast<const T*>(args.logits) + row * args.stride);
  const Extremes extremes = find_extremes(group, shared, part);
  if (!is_finite(extremes.largest)) return;  // nothing is sampled
  Ranking<Group, RowPart<T>> ranking(group, shared, best, part, extremes);
  const float mass = ranking.add_masses();
  if (wanted > 0) ranking.find(wanted);
  if (group.block() > 0) return;
#pragma unroll 1
  for (uint32_t i = group.thread(); i < args.num_parts; i += Group::kThreads) {
    args.largest[row * args.num_parts + i] = i == 0 ? extremes.largest : -kInfinity;
    args.mass[row * args.num_parts + i] = i == 0 ? mass : 0;
  }
  write_best(group, best, wanted, extremes.largest + logf(mass), args.top_tokens + row * kMaxLogprobs,
             args.top_logprobs + row * kMaxLogprobs);
}

// grid: (kRowCluster, 2 * rows), clusters of one row and one task.
// Shared memory: RowShared, Best, and from kHeadBytes on a block's part of a row of T.
template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads > 256 ? 1 : 4) sample_rows(const SampleArgs args) {
  extern __shared__ __align__(16) char memory[];
  const ClusterGroup<kThreads> group;
  auto& shared = *reinterpret_cast<RowShared<ClusterGroup<kThreads>>*>(memory);
  auto& best = *reinterpret_cast<Best*>(memory + sizeof(shared));
  T* staged = reinterpret_cast<T*>(memory + kHeadBytes);
  launch_dependents();
  cluster_arrive_relaxed();  // all blocks have started once all have waited: they write to one another
  wait_for_prerequisites();
  cluster_wait();
  const uint64_t row = blockIdx.y / 2;
  if (row >= args.header->num_rows) return;
  const Sampling& p = args.params[args.row_slots[row]].sampling;
  if (blockIdx.y % 2 > 0) {
    if (p.num_logprobs >= 0 && args.top_tokens)
      find_logprobs(group, args, row, uint32_t(p.num_logprobs), shared, best, staged);
  } else if (p.temperature >= kGreedyTemperature) {
    draw_one(group, args, row, p, shared, staged);
  }
}

}  // namespace blink
