// SPDX-License-Identifier: Apache-2.0
// gemm.cuh's GEMMs of weights of 4 bits with hi/lo FP8 of activations (hi_lo.cuh). A number from 0 to 15 in the last
// bits of a byte is e4m3 as it stands, of 2^-9 each: words become operands in registers by masks alone. Zero points
// are taken off a group's sums, times what its activations add up to.
#pragma once

#include "kernels/gemm/gemm_hi_lo.cuh"

namespace blink {

// As HiLoGemmShape; a stage is one box of 256 k, two groups.
template <int kTokens_, int kGroups_, int kCluster_, int kStages_, Output kOutput_, bool kNorm_, FormatId kWrites_>
struct Int4HiLoShape : OutputShape<kTokens_, kGroups_, kCluster_, kOutput_, kNorm_, false, kWrites_> {
  using Outputs = OutputShape<kTokens_, kGroups_, kCluster_, kOutput_, kNorm_, false, kWrites_>;
  static constexpr FormatId format = FormatId::kInt4;
  static constexpr bool grouped = true;
  static constexpr int stage_k = kUnit<format>, stages = kStages_;
  static constexpr int weight_boxes = 1, weight_columns = kUnitBytes;
  static constexpr int stage_groups = stage_k / kGroup, token_boxes = stage_k / kHiLoBox;
  static constexpr int other_warps = 2 + stage_groups;     // one for each group's activations, that adds these up
  static constexpr int columns = kHiLo * Outputs::tokens;  // of the GEMMs
  static constexpr int weight_tile = Outputs::tile * kBoxRow, token_tile = columns * kBoxRow;
  static constexpr int stage = weight_tile + token_tile * token_boxes;  // in two bytes
  static constexpr int pipeline_bytes = stages * stage * 2;
  static constexpr bool reuse = sizeof(Parts<Outputs>) > 8192;
  static constexpr int most = Outputs::tokens == 8 ? 4 - kGroups_ : Outputs::tokens == 16 ? 2 : 3 - kGroups_;
  // Blocks of an SM for which registers are kept.
  static constexpr int blocks = kGroups_ == 4 || most < 1 ? 1 : most;
  // Groups of k are under way while others are added up, where registers are enough for both.
  static constexpr bool overlap = Outputs::tokens <= 16 || kGroups_ <= 2;
  static_assert(Outputs::tokens <= 32);
  static_assert(token_boxes == stage_groups);
  static_assert(!reuse || pipeline_bytes >= int(sizeof(Parts<Outputs>)));
};

template <class S>
struct Int4HiLoShared : HiLoGemmShared<S> {
  alignas(16) float totals[S::stages][S::stage_groups][S::tokens];  // of a stage's activations
  Barrier added[S::stages];

  __device__ unsigned* groups() { return reinterpret_cast<unsigned*>(this + 1); }  // [weight rows, words_pitch()]
};

constexpr float kCodeUnit = 1.0f / 512;  // of a number in the last bits of e4m3

template <class S>
__device__ inline void initialize_others(Int4HiLoShared<S>& shared) {
  for (int i = 0; i < S::stages; i++) initialize(shared.added[i], S::stage_groups * 8);
}

// Words between rows of groups in shared memory: eight of these are in different banks.
__device__ inline int words_pitch(const GemmPlace& at) { return (2 * at.turns + 7) / 8 * 8 + 4; }

// Each warp that multiplies copies the words of its rows' groups, which no kernel of the step writes.
template <class S>
__device__ inline void prepare(const GemmArgs& args, const GemmPlace& at, Int4HiLoShared<S>& shared) {
  const int warp = threadIdx.x / 32, pitch = words_pitch(at);
  if (warp >= S::threads / 32) return;
  for (int in_tile = warp * 16; in_tile < warp * 16 + 16; in_tile++) {
    const long row = weight_row<S>(args, at, in_tile);
    const unsigned* from = args.groups + row * args.num_groups + at.first_stage * S::stage_groups;
    for (int turn = threadIdx.x % 32; turn < at.turns; turn += 32)
      start_copy<8>(shared.groups() + in_tile * pitch + turn * 2, from + turn * 2);
  }
}

// Add up four chunks of a row of a box, 64 e5m2, which are the first bytes of halves. Sums of so many over 32 are
// finite and exact but for their own rounding.
__device__ inline float add_half_row(const Bf16* box, int row, int half) {
  constexpr unsigned factor = 0x28002800u;  // 2^-5, twice
  unsigned sums[4] = {};
#pragma unroll
  for (int chunk = 0; chunk < 4; chunk++) {
    unsigned words[4];
    to_words(*reinterpret_cast<const Vec16*>(box + row * kBoxRow + (half * 4 + chunk ^ row % 8) * 8), words);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      unsigned &even = sums[i % 2 * 2], &odd = sums[i % 2 * 2 + 1];
      even = fma_halves(__byte_perm(words[i], 0, 0x2404), factor, even);
      odd = fma_halves(words[i] & 0xff00ff00u, factor, odd);
    }
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) sum += low_half(sums[i]) + low_half(sums[i] >> 16);
  return sum * 32;
}

// What warps beside those that multiply do: add up a group of each stage's activations; four lanes a token's.
template <class S>
__device__ inline void add_activations(const GemmArgs& args, const GemmPlace& at, Int4HiLoShared<S>& shared) {
  const int lane = threadIdx.x % 32, group = threadIdx.x / 32 - S::threads / 32 - 1, half = lane / 16;
  for (int turn = 0; turn < at.turns; turn++) {
    const int slot = turn % S::stages;
    wait(shared.full[slot], turn / S::stages % 2);
    const Bf16* box = shared.pipeline[slot] + S::weight_tile + group * S::token_tile;
#pragma unroll
    for (int first = 0; first < S::tokens; first += 8) {
      if (first >= args.output.rows) break;
      const int token = first + lane % 8;
      float own = add_half_row(box, half * S::tokens + token, lane / 8 % 2);
      own += __shfl_xor_sync(~0u, own, 8);
      const float other = __shfl_xor_sync(~0u, own, 16);
      if (lane < 8) shared.totals[slot][group][token] = join_hi_lo(own, other) * kCodeUnit;
    }
    if (lane < 8) arrive(shared.added[slot]);
  }
}

// Start the GEMMs of a group, half of a stage's box.
template <class S>
__device__ inline void start_group(int turn, int half, Int4HiLoShared<S>& shared, float (&parts)[S::columns / 2]) {
  const int slot = turn % S::stages;
  if (half == 0) wait(shared.full[slot], turn / S::stages % 2);
  unsigned upper[4], lower[4], a[4][4];
  load_half_units(shared.pipeline[slot], half, upper, lower);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    a[i][0] = upper[i] & 0x0f0f0f0fu, a[i][1] = lower[i] & 0x0f0f0f0fu;
    a[i][2] = upper[i] >> 4 & 0x0f0f0f0fu, a[i][3] = lower[i] >> 4 & 0x0f0f0f0fu;
    keep(a[i]);
  }
  const unsigned long long tokens = describe_box(shared.pipeline[slot] + S::weight_tile + half * S::token_tile);
  fence_wgmma();
  multiply_hi_lo<false>(parts, a[0], tokens);
#pragma unroll
  for (int i = 1; i < 4; i++) multiply_hi_lo<true>(parts, a[i], tokens + i * 2);  // addresses count 16 bytes
  commit_wgmma();
}

// Wait for a group's GEMMs, but not for so many others, and add them to the sums.
template <class S, int kOthers>
__device__ inline void add_group(const unsigned* words, int pitch, const float (&totals)[S::tokens],
                                 float (&parts)[S::columns / 2], float (&sums)[S::tokens / 2]) {
  constexpr int count = S::tokens / 2;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  const unsigned of_rows[2] = {words[row * pitch], words[(row + 8) * pitch]};
  float scales[2], zeros[2];
#pragma unroll
  for (int i = 0; i < 2; i++)
    scales[i] = group_scale<S::format>(of_rows[i]), zeros[i] = float(of_rows[i] >> 16 & 0x7f);  // the bf16's last bits
  wait_for_wgmma<kOthers>();
  keep(parts);
#pragma unroll
  for (int i = 0; i < count; i++) {
    const float total = totals[i / 4 * 8 + lane % 4 * 2 + i % 2];
    sums[i] += (join_hi_lo(parts[i], parts[i + count]) - zeros[i / 2 % 2] * total) * scales[i / 2 % 2];
  }
}

// Add a group's GEMMs to the sums, once they are there, others than the last so many.
template <class S, int kOthers>
__device__ inline void add_half(const GemmPlace& at, int turn, int half, Int4HiLoShared<S>& shared,
                                float (&parts)[S::columns / 2], float (&sums)[S::tokens / 2]) {
  const int slot = turn % S::stages;
  const unsigned* words = shared.groups() + (at.stage(turn) - at.first_stage) * S::stage_groups + half;
  wait(shared.added[slot], turn / S::stages % 2);
  add_group<S, kOthers>(words, words_pitch(at), shared.totals[slot][half], parts, sums);
  if (half == 0) return;
  __syncwarp();
  if (threadIdx.x % 32 == 0 && turn + S::stages < at.turns) arrive(shared.empty[slot]);
}

template <class S>
__device__ inline void multiply_stages(const GemmArgs&, const GemmPlace& at, Int4HiLoShared<S>& shared,
                                       float (&sums)[S::tokens / 2]) {
  wait_for_copies();
  __syncwarp();
  float even[S::columns / 2];
  if constexpr (S::overlap) {
    float odd[S::columns / 2];
    for (int turn = 0; turn < at.turns; turn++) {
      start_group<S>(turn, 0, shared, even);
      start_group<S>(turn, 1, shared, odd);
      add_half<S, 1>(at, turn, 0, shared, even, sums);
      add_half<S, 0>(at, turn, 1, shared, odd, sums);
    }
  } else {
    for (int turn = 0; turn < at.turns; turn++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        start_group<S>(turn, half, shared, even);
        add_half<S, 0>(at, turn, half, shared, even, sums);
      }
  }
#pragma unroll
  for (int i = 0; i < S::tokens / 2; i++) sums[i] *= kHiLoDivisor / kCodeUnit;
}

template <int kTokens, int kGroups, int kCluster, int kStages, Output kOutput, bool kNorm, FormatId kWrites>
__global__ void __launch_bounds__(128 * kGroups + 128,
                                  Int4HiLoShape<kTokens, kGroups, kCluster, kStages, kOutput, kNorm, kWrites>::blocks)
    gemm_hi_lo_int4(const __grid_constant__ GemmArgs args) {
  using S = Int4HiLoShape<kTokens, kGroups, kCluster, kStages, kOutput, kNorm, kWrites>;
  extern __shared__ __align__(1024) char memory[];
  compute_gemm<S>(args, *reinterpret_cast<Int4HiLoShared<S>*>(memory));
}

}  // namespace blink
