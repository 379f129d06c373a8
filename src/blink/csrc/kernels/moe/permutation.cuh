// SPDX-License-Identifier: Apache-2.0
// From the router's logits to the rows that experts treat, as grouped_gemm.cuh reads them: adjacent, from
// `places * expert` on, normalised. A block serves one expert. It finds out for itself which rows chose that expert, by
// counting the logits that are ahead.
#pragma once

#include "kernels/args.h"
#include "kernels/common/hi_lo.cuh"
#include "kernels/moe/moe_routing.cuh"

namespace blink {

// Sizes. Warps look at so many rows at once as they have registers for; groups of threads copy a row each.
template <int kRows>
struct PermutationShape {
  static constexpr int group = 256, groups = kRows > 64 ? 2 : 1, threads = group * groups, warps = threads / 32;
  static constexpr int turns = kRows < 128 ? kRows / warps : 8;       // of a warp, at once
  static constexpr int places = kRows > 64 ? kRows : 64;              // in shared memory
  static constexpr int batch = kRows < 16 ? 2 : kRows == 64 ? 8 : 4;  // rows that are copied at once
};

// A number that is in the order of the logits, whose float's bits are given, and of equal ones the lower expert's is
// the larger.
__device__ inline int rank_key(int bits, int expert) {
  return (bits < 0 ? int(0x80000000u - unsigned(bits)) : bits) + (0xffff - expert);
}

// A number, or 0, without a choice: of those by number the compiler makes places in memory.
__device__ inline unsigned only_if(bool wanted, unsigned value) { return value & -unsigned(wanted); }

// Logits of a row that a lane looks at.
template <int kWords>
struct RowLogits {
  unsigned pairs[kWords];  // of experts word * 64 + lane * 2 and the next; beyond all experts, what ranks last

  __device__ void load_row(const PermutationArgs& args, int row) {
#pragma unroll
    for (int i = 0; i < kWords; i++) {
      const int expert = i * 64 + threadIdx.x % 32 * 2;
      pairs[i] = expert < args.experts ? load_pair_from_l2(args.logits + long(row) * args.experts + expert) : ~0u;
    }
  }

  __device__ void add(const RowLogits& other, bool wanted) {
#pragma unroll
    for (int i = 0; i < kWords; i++) pairs[i] |= only_if(wanted, other.pairs[i]);
  }

  __device__ unsigned bits(int i) const { return pairs[i / 2] << (1 - i % 2) * 16 & 0xffff0000; }

  __device__ unsigned own_bits(int expert) const {
    unsigned pair = 0;
#pragma unroll
    for (int i = 0; i < kWords; i++) pair |= only_if(expert / 64 == i, pairs[i]);
    pair = __shfl_sync(~0u, pair, expert % 64 / 2);
    return pair << (1 - expert % 2) * 16 & 0xffff0000;
  }

  // How many experts are ahead of this one.
  __device__ int rank(int expert) const {
    const int own = rank_key(own_bits(expert), expert), first = threadIdx.x % 32 * 2;
    int ahead = 0;
#pragma unroll
    for (int i = 0; i < 2 * kWords; i++) ahead += rank_key(bits(i), first + i / 2 * 64 + i % 2) > own;
    return __reduce_add_sync(~0u, ahead);
  }

  __device__ float probability(int expert, int experts) const {
    const float none = __uint_as_float(0xff800000);  // minus infinity
    float logits[2 * kWords], largest = none, mass = 0;
#pragma unroll
    for (int i = 0; i < 2 * kWords; i++) {
      const bool is_expert = i / 2 * 64 + int(threadIdx.x % 32) * 2 < experts;
      logits[i] = is_expert ? __uint_as_float(bits(i)) : none;
      largest = fmaxf(largest, logits[i]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
#pragma unroll
    for (int i = 0; i < 2 * kWords; i++) mass += __expf(logits[i] - largest);
    return __expf(__uint_as_float(own_bits(expert)) - largest) / warp_sum(mass);
  }
};

template <int kRows>
struct PermutationShared {
  float inverse_rms[PermutationShape<kRows>::places];
  int ranks[PermutationShape<kRows>::places];  // of the expert among those of each row; -1 if it is not chosen

  // Which of 64 rows chose the expert.
  __device__ unsigned long long chosen(int first) const {
    const int row = first + threadIdx.x % 32;
    const unsigned low = __ballot_sync(~0u, ranks[row] >= 0), high = __ballot_sync(~0u, ranks[row + 32] >= 0);
    return low | static_cast<unsigned long long>(high) << 32;
  }
};

template <bool kHiLoActivations>
__device__ inline void write_vector(const PermutationArgs& args, long to, const Vec16& v, float rate) {
  unsigned words[4];
  to_words(v, words);
#pragma unroll
  for (unsigned& word : words) word = to_bf16_pair(low_float(word) * rate, high_float(word) * rate);
  if constexpr (!kHiLoActivations) {
    *reinterpret_cast<Vec16*>(args.out + to) = {words[0], words[1], words[2], words[3]};
  } else {
    unsigned short numbers[4][kHiLo];
#pragma unroll
    for (int i = 0; i < 4; i++) split_pair(words[i], numbers[i]);
    char* place = reinterpret_cast<char*>(args.out) + to;
#pragma unroll
    for (int half = 0; half < kHiLo; half++, place += long(args.experts) * args.places * args.hidden)
      *reinterpret_cast<uint2*>(place) = {numbers[0][half] | unsigned(numbers[1][half]) << 16,
                                          numbers[2][half] | unsigned(numbers[3][half]) << 16};
  }
}

// Copy those of 64 rows that chose the expert to its places, several at once.
template <bool kHiLoActivations, int kRows>
__device__ inline void copy_rows(const PermutationArgs& args, unsigned long long chosen, int first, long place,
                                 const PermutationShared<kRows>& shared) {
  using S = PermutationShape<kRows>;
  const int in_group = S::groups > 1 ? threadIdx.x % S::group : threadIdx.x;
  for (int column = in_group * 8; column < args.hidden; column += S::group * 8) {
    long to = place * args.hidden + column;
    for (unsigned long long left = chosen; left;) {
      Vec16 values[S::batch];
      int rows[S::batch];
#pragma unroll
      for (int i = 0; i < S::batch; i++, left &= left - 1) {
        rows[i] = left ? first + __ffsll(left) - 1 : -1;  // none left
        if (rows[i] >= 0) values[i] = load(args.x + long(rows[i]) * args.hidden + column);
      }
#pragma unroll
      for (int i = 0; i < S::batch; i++, to += args.hidden)
        if (rows[i] >= 0) write_vector<kHiLoActivations>(args, to, values[i], shared.inverse_rms[rows[i]]);
    }
  }
}

// Find out which of some rows choose the block's expert.
template <int kWords, int kTopK, int kRows>
__device__ inline void find_rows(const PermutationArgs& args, int first, int limit, PermutationShared<kRows>& shared) {
  using S = PermutationShape<kRows>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  RowLogits<kWords> logits[S::turns];
#pragma unroll
  for (int i = 0; i < S::turns; i++) logits[i].load_row(args, min(first + i * S::warps + warp, args.rows - 1));
  if (first == 0 && threadIdx.x < args.rows)
    shared.inverse_rms[threadIdx.x] = args.inverse_rms ? __uint_as_float(load_word(args.inverse_rms + threadIdx.x)) : 1;
  unsigned chosen = 0;  // turns
#pragma unroll
  for (int i = 0; i < S::turns; i++) {
    const int row = first + i * S::warps + warp;
    const int rank = logits[i].rank(blockIdx.x);
    if (row >= limit || rank >= kTopK) continue;
    chosen |= 1u << i;
    if (lane == 0) shared.ranks[row] = rank;
  }
  // Few rows choose the expert: these instructions stand once, for to load them takes longer than to run them.
#pragma unroll 1
  for (; chosen; chosen &= chosen - 1) {
    const int turn = __ffs(chosen) - 1, row = first + turn * S::warps + warp;
    RowLogits<kWords> one = {};
#pragma unroll
    for (int i = 0; i < S::turns; i++) one.add(logits[i], i == turn);
    const float probability = one.probability(blockIdx.x, args.experts);
    if (lane == 0) args.weights[row * kTopK + shared.ranks[row]] = probability;
  }
}

// kRows: 8, 16, 32, 64, 128 or 256.
template <int kRows, int kWords, int kTopK, bool kHiLoActivations>
__global__ void __launch_bounds__(PermutationShape<kRows>::threads) permute_rows(const PermutationArgs args) {
  using S = PermutationShape<kRows>;
  __shared__ PermutationShared<kRows> shared;
  launch_dependents();
  if (threadIdx.x < S::places) shared.ranks[threadIdx.x] = -1;
  __syncthreads();
  wait_for_prerequisites();
  const int limit = min(int(load_word(args.num_tokens)), args.rows);
#pragma unroll 1
  for (int first = 0; first < kRows; first += S::turns * S::warps)
    find_rows<kWords, kTopK, kRows>(args, first, limit, shared);
  __syncthreads();
  const int group = S::groups > 1 ? threadIdx.x / S::group : 0, begin = blockIdx.x * args.places;
  int place = begin;
#pragma unroll 1
  for (int first = 0; first < kRows; first += 64) {
    const unsigned long long chosen = shared.chosen(first);
    if (first / 64 % S::groups == group) copy_rows<kHiLoActivations, kRows>(args, chosen, first, place, shared);
    const unsigned row = threadIdx.x - first;  // of these
    if (row < 64 && shared.ranks[threadIdx.x] >= 0)
      args.pairs[place + __popcll(chosen & ((1ull << row) - 1))] = threadIdx.x * kTopK + shared.ranks[threadIdx.x];
    place += __popcll(chosen);
  }
  if (threadIdx.x == 0) args.counts[blockIdx.x] = place - begin;
}

}  // namespace blink
