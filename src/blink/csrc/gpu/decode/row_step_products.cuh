// SPDX-License-Identifier: Apache-2.0
// Products of row_step.cuh: 8 weight rows at a time go through a ring of stages, and all warps multiply their part of
// each row with the input.
#pragma once

#include "row_step_shape.cuh"

namespace blink {

// Where in k a group's turn is. Groups start at different places: those that go through k in step want the same memory
// channels at the same time.
template <Form kForm>
__device__ inline int turn_k(int group, int turn, int turns) {
  return (group * 7 + turn) % turns * kStageK<kForm>;
}

template <Form kForm>
__device__ inline int count_turns(int k) {
  return (k + kStageK<kForm> - 1) / kStageK<kForm>;
}

// Copy some k of 8 weight rows, a lane each: four from `first` on and four from `half` further on.
template <class S, Form kForm>
__device__ inline void copy_stage(const Matrix& matrix, long first, long half, int k, int from, int stage_k,
                                  Cursor<S::slots>& at, RowStepShared<S>& shared) {
  const int lane = threadIdx.x % 32;
  const long row = first + lane % 4 + lane / 4 % 2 * half;
  const unsigned bytes = stage_k / kChunkK<kForm> * kChunkBytes<kForm>;
  const unsigned others = kForm == Form::kInt4 ? stage_k / kGroup * 4 : kHasScales<kForm> ? 4 : 0;  // of each row
  auto& stage = shared.ring[at.slot];
  Barrier& full = shared.full[at.slot];
  if (at.wrapped) wait(shared.empty[at.slot], at.parity ^ 1);
  if (lane == 0) expect(full, kStageRows * (bytes + others));
  __syncwarp();
  if (lane < kStageRows)
    copy_once(stage.rows[lane], matrix.values + (row * k + from) / kChunkK<kForm> * kChunkBytes<kForm>, bytes, full);
  if constexpr (kForm == Form::kInt4)
    if (lane / kStageRows == 1)
      copy_once(stage.groups[lane - kStageRows], matrix.groups + (row * k + from) / kGroup, others, full);
  if constexpr (kHasScales<kForm>)
    if (lane / 2 == 4) copy_once(stage.scales + lane % 2 * 4, matrix.scales + first + lane % 2 * half, 16, full);
  at.advance();
}

// Copy the block's part of a product's weights.
template <class S, Form kForm, bool kGate>
__device__ inline void copy_product(const Matrix& matrix, int groups, int k, Cursor<S::slots>& at,
                                    RowStepShared<S>& shared) {
  const int turns = count_turns<kForm>(k);
  const GroupShare share(groups);
  for (int group = share.first; group < share.last; group++)
    for (int turn = 0; turn < turns; turn++) {
      const int from = turn_k<kForm>(group, turn, turns);
      copy_stage<S, kForm>(matrix, group * (kGate ? 4l : 8l), kGate ? groups * 4l : 4, k, from,
                           min(kStageK<kForm>, k - from), at, shared);
    }
}

// Bring the block's part of a product's weights to L2.
template <Form kForm>
__device__ inline void prefetch_product(const Matrix& matrix, int groups, int k) {
  const GroupShare share(groups);
  const long row_bytes = long(k) / kChunkK<kForm> * kChunkBytes<kForm>;
  const int pieces = int(share.count() * kStageRows * row_bytes / kStageBytes);
  for (int i = threadIdx.x % 32; i < pieces; i += 32)
    prefetch_bytes(matrix.values + share.first * kStageRows * row_bytes + long(i) * kStageBytes, kStageBytes);
}

// A warp's sums of the products of 8 weight rows with the input. To the matrix instruction the input is each of its
// first 8 rows, and its others take every second pair of k, or the second halves of 4 bits' whole numbers.
template <Form kForm>
struct GroupSums {  // of e4m3 and bf16
  float even[4] = {}, odd[4] = {};
  float scales[2] = {1, 1};

  // Add a chunk. weights: of this lane's row; from: the chunk's k, in the input and in the stage.
  template <class Stage, int kMostK>
  __device__ void add(const char* weights, const Stage&, const Input<kMostK>& x, int from, int) {
    const int part = threadIdx.x % 4;
    if constexpr (kForm == Form::kBf16) {
      const Vec16 a = x.plain[from / 8 + part], b = *reinterpret_cast<const Vec16*>(weights + part * 16);
      multiply_add(even, a.x, a.z, a.y, a.w, b.x, b.y);
      multiply_add(odd, a.x, a.z, a.y, a.w, b.z, b.w);
    } else if constexpr (kForm == Form::kFp8Rows) {  // a lane has 16 k
      multiply_words(weights + part * 16, x.plain + from / 8 + part * 2, 1);
    } else {
#pragma unroll
      for (int half = 0; half < 2; half++)
        multiply_words(weights + part * 32 + half * 16, &x.halves[from / 32 + half * 2][part], 4);
    }
  }

  // Multiply four words of e4m3, every two of them with a vector; vectors are so far apart.
  __device__ void multiply_words(const char* from, const Vec16* x, int stride) {
    unsigned words[4], pairs[1][2];
    to_words(*reinterpret_cast<const Vec16*>(from), words);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const Vec16 a = x[i / 2 * stride];
      unpack_half<Format::kFp8>(words[i], 0, pairs);
      multiply_add_halves(i % 2 ? odd : even, a.x, a.z, a.y, a.w, pairs[0][0], pairs[0][1]);
    }
  }

  // Take the rows' scales.
  template <class Stage>
  __device__ void take_scales(const Stage& stage) {
    if constexpr (kHasScales<kForm>)
      for (int i = 0; i < 2; i++) scales[i] = stage.scales[threadIdx.x % 4 * 2 + i];
  }

  __device__ float2 total() const { return {(even[0] + odd[2]) * scales[0], (even[1] + odd[3]) * scales[1]}; }
};

template <>
struct GroupSums<Form::kInt4> {
  float totals[2] = {};

  template <class Stage, int kMostK>
  __device__ void add(const char* weights, const Stage& stage, const Input<kMostK>& x, int from, int in_stage) {
    const int part = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kUnit<Format::kInt4> / kGroup; i++) {
      int sums[4] = {};
      unsigned words[4];
      to_words(*reinterpret_cast<const Vec16*>(weights + part * 32 + i * 16), words);
#pragma unroll
      for (int word = 0; word < 4; word++) {
        unsigned a[4];
        to_words(x.cut.whole[from / 32 + i * 4 + word][part], a);
        multiply_add_bytes(sums, a, words[word] & 0x0f0f0f0fu, words[word] >> 4 & 0x0f0f0f0fu);
      }
      const Int4Group group = x.cut.groups[from / kGroup + i];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const unsigned word = stage.groups[part * 2 + j][in_stage / kGroup + i];
        const int zero = word >> 16 & 0x7f;  // the bf16's last bits
        totals[j] +=
            float(sums[j] * 256 + sums[j + 2] - zero * group.sum) * (group_scale<Format::kInt4>(word) * group.scale);
      }
    }
  }

  template <class Stage>
  __device__ void take_scales(const Stage&) {}

  __device__ float2 total() const { return {totals[0], totals[1]}; }
};

// Add a warp's part of a stage to its sums: every kStepWarps-th chunk. from: the stage's k.
template <class S, Form kForm>
__device__ inline void multiply_stage(GroupSums<kForm>& sums, int from, int stage_k, Cursor<S::slots>& at,
                                      RowStepShared<S>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int chunks = kStageK<kForm> / kChunkK<kForm> / kStepWarps;
  const auto& stage = shared.ring[at.slot];
  wait(shared.full[at.slot], at.parity);
#pragma unroll
  for (int i = 0; i < chunks; i++) {
    const int chunk = i * kStepWarps + warp, k = chunk * kChunkK<kForm>;
    if (k < stage_k) sums.add(stage.rows[lane / 4] + chunk * kChunkBytes<kForm>, stage, shared.x, from + k, k);
  }
  sums.take_scales(stage);
  __syncwarp();
  if (lane == 0) arrive(shared.empty[at.slot]);
  at.advance();
}

// Multiply groups of weight rows with the input; leaves each warp's sums.
template <class S, Form kForm>
__device__ inline void multiply_groups(GroupShare share, int k, Cursor<S::slots>& at, RowStepShared<S>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, turns = count_turns<kForm>(k);
  for (int group = share.first; group < share.last; group++) {
    GroupSums<kForm> sums;
    for (int turn = 0; turn < turns; turn++) {
      const int from = turn_k<kForm>(group, turn, turns);
      multiply_stage<S, kForm>(sums, from, min(kStageK<kForm>, k - from), at, shared);
    }
    if (lane < 4) *reinterpret_cast<float2*>(&shared.sums[group - share.first][warp][lane * 2]) = sums.total();
  }
}

// Let a function multiply groups of weight rows, and all threads finish some of them together.
template <class Multiply, class Finish>
__device__ inline void run_product(GroupShare share, Multiply multiply, Finish finish) {
  for (int first = share.first; first < share.last; first += kMostGroups) {
    const GroupShare some(first, min(first + kMostGroups, share.last));
    sync_warps<kStepWarps>();
    multiply(some);
    sync_warps<kStepWarps>();
    finish(some);
  }
}

// Add up the warps' sums of a weight row of a group and the next. kNorm: whether the input had a norm.
template <class S, Form kForm, bool kNorm>
__device__ inline float2 add_warps(int group, int row, const RowStepShared<S>& shared) {
  float2 total = {};
#pragma unroll
  for (int warp = 0; warp < kStepWarps; warp++) {
    const float2 sums = *reinterpret_cast<const float2*>(&shared.sums[group][warp][row]);
    total.x += sums.x, total.y += sums.y;
  }
  if (kHasScales<kForm>) total.x *= shared.inverse[kNorm], total.y *= shared.inverse[kNorm];
  return total;
}

}  // namespace blink
