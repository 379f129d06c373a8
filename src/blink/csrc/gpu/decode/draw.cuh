// SPDX-License-Identifier: Apache-2.0
// The token of a row that does not take its largest logit: of those above the floor that min-p, top-k and top-p leave,
// the largest with noise (Gumbel's, from Philox4x32-10; kernels/cpu/philox.py says how). Few logits can win at all,
// which a look at the random bits tells: logarithms are for those.
#pragma once

#include "truncation.cuh"

namespace blink {

constexpr float kGreedyTemperature = 1e-5f;
constexpr float kLeastNoise = -2.82f, kMostNoise = 22.88f;  // of the largest and the smallest random word

struct Words {
  uint32_t of[4];
};

// The random words of four tokens from a multiple of 4 on.
__device__ inline Words philox(uint32_t first, uint32_t step, uint32_t key_low, uint32_t key_high) {
  Words w{{first / 4, 0, step, 0}};
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint64_t a = uint64_t(0xD2511F53u) * w.of[0], b = uint64_t(0xCD9E8D57u) * w.of[2];
    w = {{uint32_t(b >> 32) ^ w.of[1] ^ key_low, uint32_t(b), uint32_t(a >> 32) ^ w.of[3] ^ key_high, uint32_t(a)}};
    key_low += 0x9E3779B9u, key_high += 0xBB67AE85u;
  }
  return w;
}

// A random word as a number between 0 and 1, and that as noise.
__device__ inline float to_uniform(uint32_t word) { return fminf((float(word) + 0.5f) * 0x1p-32f, 1 - 0x1p-24f); }
__device__ inline float to_noise(float uniform) { return -logf(-log1pf(-uniform)); }

struct Winner {
  float value;  // with noise
  uint32_t token;
};
__device__ inline Winner better(Winner a, Winner b) {
  return b.value > a.value || (b.value == a.value && b.token < a.token) ? b : a;
}

template <class T, int kThreads>
class Draw {
 public:
  __device__ Draw(RowShared& shared, const RowPart<T>& part, float largest, float factor)
      : shared_(shared), part_(part), largest_(largest), factor_(factor) {}

  // Thread 0 of block 0 gets the winner of the row.
  __device__ Winner run(float floor, uint32_t step, const Sampling& p) {
    if (threadIdx.x == 0) shared_.best_key = to_key(largest_ * factor_ + kLeastNoise);
    __syncthreads();
    Winner found{-kInfinity, ~0u};
    const uint32_t seed_low = p.seed_low, seed_high = p.seed_high;
#pragma unroll 1  // the step's kernels share the instruction cache
    for (uint32_t i = threadIdx.x; i < part_.count; i += kThreads) {
      const Quad quad = part_.get(i);
      const float best = from_key(peek(shared_.best_key));
      const float most = fmaxf(fmaxf(quad.values[0], quad.values[1]), fmaxf(quad.values[2], quad.values[3]));
      if (most < floor || most * factor_ + kMostNoise < best) continue;
      const uint32_t first = (part_.first + i) * 4;
      const Words words = philox(first, step, seed_low, seed_high);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float value = quad.values[j] * factor_, uniform = to_uniform(words.of[j]);
        // -log(uniform) is above the noise, and must reach from the value to the best; a little more for roundings.
        if (quad.values[j] < floor || uniform > exp2_fast((value - best) * kLog2E) * 1.0001f) continue;
        const Winner other{value + to_noise(uniform), first + j};
        if (other.value > best) atomicMax(&shared_.best_key, to_key(other.value));
        found = better(found, other);
      }
    }
    return meet_winners(found);
  }

 private:
  __device__ Winner meet_winners(Winner found) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      found = better(found, {__shfl_xor_sync(~0u, found.value, step), __shfl_xor_sync(~0u, found.token, step)});
    if (lane == 0) shared_.values[warp] = found.value, shared_.tokens[warp] = found.token;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int other = 1; other < kThreads / 32; other++)
        found = better(found, {shared_.values[other], shared_.tokens[other]});
      store_in_cluster(address_in(0, &shared_.block_values[cluster_rank()]), found.value);
      store_in_cluster(address_in(0, &shared_.block_tokens[cluster_rank()]), found.token);
    }
    meet();
    for (int other = 0; other < kRowCluster; other++)
      found = better(found, {shared_.block_values[other], shared_.block_tokens[other]});
    return found;
  }

  RowShared& shared_;
  const RowPart<T>& part_;
  const float largest_, factor_;
};

// Find the least logit that may be drawn. Every block finds the same.
template <class T, int kThreads>
__device__ float find_floor(RowShared& shared, const RowPart<T>& part, Extremes extremes, float factor,
                            const Sampling& p) {
  FloorSearch<T, kThreads> search(shared, part, extremes, factor);
  if (p.min_p > 0) search.floor = extremes.largest + logf(p.min_p) / factor;
  if (p.top_k > 0) search.template raise<false>(float(p.top_k));
  if (p.top_p < 1) search.template raise<true>(p.top_p);
  return search.floor;
}

}  // namespace blink
