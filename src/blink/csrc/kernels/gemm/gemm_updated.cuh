// SPDX-License-Identifier: Apache-2.0
// A GEMM whose sums get what adapters (LoRA) change of them: B of each row's adapter times what shrink.cuh found. A
// kernel of its own for that took longer to launch than to work.
//
// The order of launches is: the kernel that writes x, shrink, this GEMM, each launched early (PDL). No block here can
// keep out one that it waits for: all blocks of shrink have begun when the first one here does. They in turn
// began when all of the kernel in front had. So shrink's word that x is there comes, whatever else runs. A block
// reads x upon that word, while shrink reads it, too; and what shrink found after its end.
#pragma once

#include "kernels/gemm/gemm.cuh"

namespace blink {

constexpr int kRankStep = 16;  // of a rank, that an MMA takes
constexpr int kHeldUpdates = 4;
constexpr int kMostLooks = 1 << 14;  // some milliseconds; then a block waits for shrink's end, which says as much

// A lane's values of B, as multiply_add()'s a. The lane has four neighbouring k of a row.
struct UpRows {
  uint2 first, second;  // of a row and the row eight further
};

struct Update {
  const UpdateArgs& args;

  __device__ void await_input() const {
    int looks = 0;
    while (int(load_acquire(args.begun)) < args.turn)
      if (++looks == kMostLooks) {
        wait_for_prerequisites();
        break;
      }
    let_copies_see();
  }

  // The copying thread has waited, in front of a barrier of all threads.
  __device__ void await() const {}

  // The nth pair of an adapter and a step of the rank that this block of the cluster adds: its adapter, or 0.
  template <class S>
  __device__ int find(int rank, int nth, int& step) const {
    const int steps = args.rank / kRankStep, pair = nth * S::cluster + rank;
    step = pair % steps;
    return pair / steps < S::tokens ? args.distinct[pair / steps] : 0;
  }

  __device__ UpRows load_rows(int adapter, int row, int other_row, int step) const {
    if (adapter == 0) return {};
    const Bf16* from = args.up + (adapter - 1) * args.up_stride + step * kRankStep + threadIdx.x % 4 * 4;
    return {*reinterpret_cast<const uint2*>(from + long(row) * args.rank),
            *reinterpret_cast<const uint2*>(from + long(other_row) * args.rank)};
  }

  // Multiply one adapter's rows, and add that to its tokens' sums. Others keep their bits, whatever the rows hold.
  // places: those of tokens in multiply_add()'s columns.
  template <class S>
  __device__ void add(const UpRows& rows, int adapter, const uint2 (&found)[S::tokens / 8],
                      const int (&places)[S::tokens / 8], float (&sums)[S::tokens / 2]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < S::tokens / 8; i++) {
      const bool is_own = places[i] == adapter;
      const unsigned own = __ballot_sync(~0u, is_own);
      if (own == 0) continue;
      float added[4] = {};
      multiply_add(added, rows.first.x, rows.second.x, rows.first.y, rows.second.y, is_own ? found[i].x : 0,
                   is_own ? found[i].y : 0);
      // The lanes that have column c begin at 4 * c; this one has sums of columns lane % 4 * 2 and the next.
      const bool adds_first = own >> lane % 4 * 8 & 1, adds_second = own >> (lane % 4 * 8 + 4) & 1;
      if (adds_first) sums[i * 4] += added[0], sums[i * 4 + 2] += added[2];
      if (adds_second) sums[i * 4 + 1] += added[1], sums[i * 4 + 3] += added[3];
    }
  }

  // What was found of the tokens in multiply_add()'s columns.
  template <class S>
  __device__ void load_found(int column, const int (&places)[S::tokens / 8], uint2 (&found)[S::tokens / 8]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < S::tokens / 8; i++) {
      const Bf16* from = args.found + long(i * 8 + lane / 4) * args.width + column + lane % 4 * 4;
      found[i] = places[i] > 0 ? uint2{load_word(from), load_word(from + 2)} : uint2{0, 0};
    }
  }

  // Multiply all stages. What is found is added once all copies are under way: a pipeline would run dry meanwhile.
  template <class S>
  __device__ void multiply(const GemmArgs& gemm, const GemmPlace& at, GemmShared<S>& shared,
                           float (&sums)[S::tokens / 2]) const {
    const int lane = threadIdx.x % 32, in_tile = threadIdx.x / 32 * 16 + lane / 4;
    const int row = weight_row<S>(gemm, at, in_tile), other_row = weight_row<S>(gemm, at, in_tile + 8);
    const int first_row = weight_row<S>(gemm, at, in_tile - lane / 4);
    const int middle = max(at.turns - S::stages, at.turns / 2);
    UpRows held[kHeldUpdates];
    int adapters[kHeldUpdates], steps[kHeldUpdates];
#pragma unroll
    for (int i = 0; i < kHeldUpdates; i++) {
      adapters[i] = find<S>(at.rank, i, steps[i]);
      held[i] = load_rows(adapters[i], row, other_row, steps[i]);
    }
    multiply_turns<S>(at, 0, middle, shared, sums);
    wait_for_prerequisites();  // for the end of shrink
    if (adapters[0] > 0) add_all<S>(gemm.output, at, row, other_row, first_row, held, adapters, steps, sums);
    multiply_turns<S>(at, middle, at.turns, shared, sums);
  }

  template <class S>
  __device__ void add_all(const OutputArgs& output, const GemmPlace& at, int row, int other_row, int first_row,
                          UpRows (&held)[kHeldUpdates], int (&adapters)[kHeldUpdates], int (&steps)[kHeldUpdates],
                          float (&sums)[S::tokens / 2]) const {
    int places[S::tokens / 8];
    uint2 found[S::tokens / 8];
#pragma unroll
    for (int i = 0; i < S::tokens / 8; i++) {
      const int token = i * 8 + int(threadIdx.x) % 32 / 4;
      places[i] = token < output.rows ? args.places[token] : 0;
    }
    const int part = args.parts[first_row / args.tile] * args.rank;
    for (int first = 0, loaded = -1;; first += kHeldUpdates) {
#pragma unroll
      for (int i = 0; i < kHeldUpdates; i++) {
        if (adapters[i] == 0) return;
        if (steps[i] != loaded) load_found<S>(part + steps[i] * kRankStep, places, found);
        loaded = steps[i];
        add<S>(held[i], adapters[i], found, places, sums);
      }
#pragma unroll
      for (int i = 0; i < kHeldUpdates; i++) {
        adapters[i] = find<S>(at.rank, first + kHeldUpdates + i, steps[i]);
        held[i] = load_rows(adapters[i], row, other_row, steps[i]);
      }
    }
  }
};

template <int kTokens, int kGroups, int kCluster, int kStageK, int kStages, Output kOutput, bool kNorm,
          FormatId kWrites>
__global__ void __launch_bounds__(
    128 * kGroups + 64, GemmShape<kTokens, kGroups, kCluster, kStageK, kStages, kOutput, kNorm, kWrites>::blocks)
    gemm_updated(const __grid_constant__ UpdatedGemmArgs args) {
  using S = GemmShape<kTokens, kGroups, kCluster, kStageK, kStages, kOutput, kNorm, kWrites>;
  extern __shared__ __align__(1024) char memory[];
  compute_gemm<S>(args.gemm, *reinterpret_cast<GemmShared<S>*>(memory), Update{args.update});
}

}  // namespace blink
