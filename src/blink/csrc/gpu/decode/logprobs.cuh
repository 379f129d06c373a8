// SPDX-License-Identifier: Apache-2.0
// A row's best logits and the mass of all, as the model made them. Of equal logits those of the lowest tokens come
// first.
#pragma once

#include "truncation.cuh"

namespace blink {

struct Best {  // block 0's
  float values[kMaxLogprobs];
  uint32_t tokens[kMaxLogprobs];
  uint32_t count;
  // Every block's. Each look for a tie has a word of its own, for others may be one look ahead.
  uint32_t ties[2 * kMaxLogprobs];  // lowest tokens of equal logits; then of those that are not finite
  uint32_t num_above;
};

template <class T, int kThreads>
class Ranking {
 public:
  __device__ Ranking(RowShared& shared, Best& best, const RowPart<T>& part, Extremes extremes)
      : shared_(shared), best_(best), part_(part), extremes_(extremes) {}

  // The sum of exp(logit - largest). Block 0 gets it.
  __device__ float add_masses() {
    float mass = 0, none = 0;
    part_.template for_each<kThreads>(
        [&](float value, uint32_t) { mass += exp2_fast((value - extremes_.largest) * kLog2E); });
    add_up<kThreads>(shared_, mass, none);
    if (threadIdx.x == 0) store_in_cluster(address_in(0, &shared_.total[cluster_rank()]), mass);
    meet();
    return sum_of_blocks(shared_.total);
  }

  // Leave the best logits in block 0, in no order: those above the last one, then its equals from the lowest token on.
  __device__ void find(uint32_t wanted) {
    FloorSearch<T, kThreads> search(shared_, part_, extremes_, 1);
    search.template raise<false>(float(wanted));
    if (threadIdx.x < 2 * kMaxLogprobs) best_.ties[threadIdx.x] = kNoTie;
    if (threadIdx.x == 0) best_.count = 0;
    meet();
    list_above(search.floor);
    meet();
    if (cluster_rank() == 0 && threadIdx.x < kRowCluster)
      store_in_cluster(address_in(threadIdx.x, &best_.num_above), best_.count);
    meet();
    float tied = search.floor;
    for (uint32_t place = best_.num_above, next = 0; place < wanted;) {
      uint32_t& tie = best_.ties[tied == -kInfinity ? kMaxLogprobs + place : place];
      lower_to_tied(tie, tied, next);
      meet();
      const uint32_t token = tie;
      if (token == kNoTie) {  // there are not so many finite ones
        if (tied == -kInfinity) return;
        tied = -kInfinity, next = 0;
        continue;
      }
      if (threadIdx.x == 0) best_.values[place] = tied, best_.tokens[place] = token;
      next = token + 1, place++;
    }
  }

 private:
  static constexpr uint32_t kNoTie = ~0u;

  __device__ void list_above(float floor) {
    const unsigned values = address_in(0, best_.values), tokens = address_in(0, best_.tokens);
    part_.template for_each<kThreads>([&](float value, uint32_t token) {
      if (!(value > floor)) return;
      const uint32_t place = add_in_cluster(address_in(0, &best_.count), 1);
      store_in_cluster(values + place * 4, value);
      store_in_cluster(tokens + place * 4, token);
    });
  }

  // Tell all blocks the lowest token from `next` on with that logit.
  __device__ void lower_to_tied(uint32_t& tie, float tied, uint32_t next) {
    uint32_t lowest = kNoTie;
    part_.template for_each<kThreads>([&](float value, uint32_t token) {
      if (value == tied && token >= next) lowest = min(lowest, token);
    });
    if (lowest == kNoTie) return;
#pragma unroll 1
    for (int rank = 0; rank < kRowCluster; rank++) lower_in_cluster(address_in(rank, &tie), lowest);
  }

  RowShared& shared_;
  Best& best_;
  const RowPart<T>& part_;
  const Extremes extremes_;
};

// Write the best ones in order. Runs on: the first threads of block 0.
__device__ inline void write_best(const Best& best, uint32_t count, float log_mass, int32_t* tokens, float* logprobs) {
  __syncthreads();
  if (threadIdx.x >= count) return;
  const float value = best.values[threadIdx.x];
  const uint32_t token = best.tokens[threadIdx.x];
  uint32_t rank = 0;
#pragma unroll 1
  for (uint32_t other = 0; other < count; other++)
    rank += best.values[other] > value || (best.values[other] == value && best.tokens[other] < token);
  tokens[rank] = int32_t(token);
  logprobs[rank] = value - log_mass;
}

}  // namespace blink
