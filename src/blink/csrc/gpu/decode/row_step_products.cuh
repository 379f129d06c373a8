// SPDX-License-Identifier: Apache-2.0
// Products of row_step.cuh: 8 weight rows at a time go through a ring of stages, and all warps multiply their part of
// each row with the input. Of all the block's rows the same k comes first, so that a warp keeps the input's in
// registers.
#pragma once

#include "row_step_shape.cuh"

namespace blink {

__device__ inline unsigned copy_warp() { return threadIdx.x / 32 - kStepWarps; }

// Where a turn's k begin. Blocks begin with different ones: those that go through k in step want the same memory
// channels at the same time.
template <Form kForm, int kK>
__device__ inline int turn_start(int turn) {
  constexpr int full = kK / kStageK<kForm>;
  if constexpr (full > 0)
    if (turn < full) turn = (turn + blockIdx.x) % full;
  return turn * kStageK<kForm>;
}

// Of rows of kK, the k of a stage from `from` on.
template <Form kForm, int kK>
__device__ inline int stage_k(int from) {
  return min(kStageK<kForm>, kK - from);
}

// So many k as bytes.
template <Form kForm>
__device__ inline long k_bytes(long k) {
  return k / kChunkK<kForm> * kChunkBytes<kForm>;
}

// The 8 rows of a group of weight rows: four from `first` on and four from `half` further on.
struct GroupRows {
  long first, half;

  template <bool kGate>
  __device__ static GroupRows of(int group, int groups) {
    return kGate ? GroupRows{group * 4l, groups * 4l} : GroupRows{group * 8l, 4};
  }

  __device__ long row(int i) const { return first + i % 4 + i / 4 % 2 * half; }
};

// Copy a stage of rows of kK, a lane each row. number: the stage's.
template <class S, Form kForm, int kK>
__device__ inline void copy_stage(const Matrix& matrix, GroupRows rows, int from, unsigned number,
                                  RowStepShared<S>& shared) {
  const int lane = threadIdx.x % 32, slot = number % S::slots, count = stage_k<kForm, kK>(from);
  const long at = rows.row(lane) * kK + from;
  const unsigned bytes = k_bytes<kForm>(count);
  const unsigned others = kForm == Form::kInt4 ? count / kGroup * 4 : kHasScales<kForm> ? 4 : 0;  // of each row
  auto& stage = shared.ring[slot];
  Barrier& full = shared.full[slot];
  if (number >= S::slots) wait(shared.empty[slot], number / S::slots % 2 ^ 1);
  if (lane == 0) expect(full, kStageRows * (bytes + others));
  __syncwarp();
  if (lane < kStageRows) copy_once(stage.rows + lane * kPitch<kForm>, matrix.values + k_bytes<kForm>(at), bytes, full);
  if constexpr (kForm == Form::kInt4)
    if (lane / kStageRows == 1) copy_once(stage.groups[lane - kStageRows], matrix.groups + at / kGroup, others, full);
  if constexpr (kHasScales<kForm>)
    if (lane / 2 == 4) copy_once(stage.scales + lane % 2 * 4, matrix.scales + rows.row(lane % 2 * 4), 16, full);
}

// Copy this warp's of the next stages: of all groups of weight rows those of a turn's k, then those of the next. done:
// stages so far; copy(turn, group, number of the stage).
template <class Copy>
__device__ inline void copy_turns(GroupShare share, int turns, unsigned& done, Copy copy) {
#pragma unroll 1
  for (int turn = 0; turn < turns; turn++, done += share.count())
#pragma unroll 1
    for (int i = int((copy_warp() - done) % kCopyWarps); i < share.count(); i += kCopyWarps)
      copy(turn, share.first + i, done + i);
}

// Copy the block's part of a product's weights.
template <class S, Form kForm, int kK, bool kGate>
__device__ inline void copy_product(const Matrix& matrix, int groups, unsigned& done, RowStepShared<S>& shared) {
  GroupShare(groups).take_parts([&](GroupShare some) {
    copy_turns(some, kTurns<kForm, kK>, done, [&](int turn, int group, unsigned number) {
      copy_stage<S, kForm, kK>(matrix, GroupRows::of<kGate>(group, groups), turn_start<kForm, kK>(turn), number,
                               shared);
    });
  });
}

// Bring some stages of a product, in the order of copies, to L2: the memory has them ready while nobody makes room.
template <Form kForm, int kK, bool kGate>
__device__ inline void prefetch_stages(const Matrix& matrix, int groups, int first, int last) {
  const GroupShare share(groups);
  const int lane = threadIdx.x % 32, count = min(share.count(), kMostGroups);
  for (int stage = first + copy_warp(); stage < min(last, count * kTurns<kForm, kK>); stage += kCopyWarps) {
    const int from = turn_start<kForm, kK>(stage / count);
    const long row = GroupRows::of<kGate>(share.first + stage % count, groups).row(lane);
    if (lane < kStageRows)
      prefetch_bytes(matrix.values + k_bytes<kForm>(row * kK + from), k_bytes<kForm>(stage_k<kForm, kK>(from)));
  }
}

// A chunk of the input in a lane's registers. To the matrix instruction the input is each of its first 8 rows, and its
// others take every second pair of k, or the second halves of 4 bits' whole numbers.
template <Form kForm>
struct ChunkInput {
  unsigned values[kChunkK<kForm> / 32][4];

  template <int kMostK>
  __device__ void load(const Input<kMostK>& x, int from) {
    const int part = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kChunkK<kForm> / 32; i++)
      if constexpr (kForm == Form::kBf16)
        to_words(x.plain[from / 8 + part], values[i]);
      else if constexpr (kForm == Form::kFp8Rows)
        to_words(x.plain[from / 8 + part * 2 + i], values[i]);
      else
        to_words(x.halves[from / 32 + i][part], values[i]);
  }
};

template <>
struct ChunkInput<Form::kInt4> {
  static constexpr int count = kUnit<Format::kInt4> / kGroup;
  unsigned whole[count][4][4];  // of each group's words
  Int4Group groups[count];

  template <int kMostK>
  __device__ void load(const Input<kMostK>& x, int from) {
#pragma unroll
    for (int i = 0; i < count; i++) {
#pragma unroll
      for (int word = 0; word < 4; word++)
        to_words(x.cut.whole[from / 32 + i * 4 + word][threadIdx.x % 4], whole[i][word]);
      groups[i] = x.cut.groups[from / kGroup + i];
    }
  }
};

// A lane's part of a chunk of weights, and of 4 bits the words of its groups.
template <Form kForm>
struct ChunkWeights {
  static constexpr int count = kChunkBytes<kForm> / 64;
  unsigned words[count][4];
  unsigned groups[kForm == Form::kInt4 ? 2 : 1][count];  // of two rows

  // lanes: of the lane's row, the lane's part; k: the chunk's in the stage.
  template <class Stage>
  __device__ void load(const char* lanes, const Stage& stage, int k) {
#pragma unroll
    for (int i = 0; i < count; i++) to_words(reinterpret_cast<const Vec16*>(lanes)[i], words[i]);
    if constexpr (kForm == Form::kInt4)
#pragma unroll
      for (int row = 0; row < 2; row++)
#pragma unroll
        for (int i = 0; i < count; i++) groups[row][i] = stage.groups[threadIdx.x % 4 * 2 + row][k / kGroup + i];
  }
};

// A warp's sums of the products of 8 weight rows with the input.
template <Form kForm>
struct GroupSums {  // of e4m3 and bf16
  float even[4] = {}, odd[4] = {};

  __device__ void add(const ChunkWeights<kForm>& weights, const ChunkInput<kForm>& x) {
#pragma unroll
    for (int i = 0; i < ChunkWeights<kForm>::count; i++) {
      const unsigned (&b)[4] = weights.words[i];
      if constexpr (kForm == Form::kBf16) {
        const unsigned (&a)[4] = x.values[0];
        multiply_add(even, a[0], a[1], a[2], a[3], b[0], b[1]);
        multiply_add(odd, a[0], a[1], a[2], a[3], b[2], b[3]);
      } else {
#pragma unroll
        for (int word = 0; word < 4; word++) {
          const unsigned (&a)[4] = x.values[i * 2 + word / 2];
          unsigned pairs[1][2];
          unpack_half<Format::kFp8>(b[word], 0, pairs);
          multiply_add_halves(word % 2 ? odd : even, a[0], a[1], a[2], a[3], pairs[0][0], pairs[0][1]);
        }
      }
    }
  }

  __device__ float2 total() const { return {even[0] + odd[2], even[1] + odd[3]}; }
};

template <>
struct GroupSums<Form::kInt4> {
  float totals[2] = {};

  __device__ void add(const ChunkWeights<Form::kInt4>& weights, const ChunkInput<Form::kInt4>& x) {
#pragma unroll
    for (int i = 0; i < ChunkWeights<Form::kInt4>::count; i++) {
      int sums[2][4] = {};  // two chains of instructions
#pragma unroll
      for (int word = 0; word < 4; word++) {
        const unsigned b = weights.words[i][word];
        multiply_add_bytes(sums[word % 2], x.whole[i][word], b & 0x0f0f0f0fu, b >> 4 & 0x0f0f0f0fu);
      }
#pragma unroll
      for (int row = 0; row < 2; row++) {
        const unsigned word = weights.groups[row][i];
        const int zero = word >> 16 & 0x7f;  // the bf16's last bits
        const int first = sums[0][row] + sums[1][row], second = sums[0][row + 2] + sums[1][row + 2];
        totals[row] += float(first * 256 + second - zero * x.groups[i].sum) *
                       (group_scale<Format::kInt4>(word) * x.groups[i].scale);
      }
    }
  }

  __device__ float2 total() const { return {totals[0], totals[1]}; }
};

// What a warp has of a turn's kTurnK: every kStepWarps-th chunk.
template <class S, Form kForm, int kTurnK>
struct TurnPart {
  static constexpr int all = kTurnK / kChunkK<kForm>, chunks = (all + kStepWarps - 1) / kStepWarps;
  ChunkInput<kForm> x[chunks];

  // Of a stage: what it multiplies.
  struct Weights {
    ChunkWeights<kForm> of[chunks];
    float2 scales = {1, 1};
  };

  __device__ static int chunk(int i) { return i * kStepWarps + threadIdx.x / 32; }
  __device__ static bool has(int i) { return (i + 1) * kStepWarps <= all || chunk(i) < all; }

  // first: the turn's k in the input.
  __device__ TurnPart(int first, const RowStepShared<S>& shared) {
#pragma unroll
    for (int i = 0; i < chunks; i++)
      if (has(i)) x[i].load(shared.x, first + chunk(i) * kChunkK<kForm>);
  }

  // Take a stage's weights and make room for others.
  __device__ static void take(unsigned number, Weights& weights, RowStepShared<S>& shared) {
    const int lane = threadIdx.x % 32, slot = number % S::slots;
    const auto& stage = shared.ring[slot];
    const char* lanes = stage.rows + lane / 4 * kPitch<kForm> + lane % 4 * (kChunkBytes<kForm> / 4);
    wait(shared.full[slot], number / S::slots % 2);
#pragma unroll
    for (int i = 0; i < chunks; i++)
      if (has(i)) weights.of[i].load(lanes + chunk(i) * kChunkBytes<kForm>, stage, chunk(i) * kChunkK<kForm>);
    if constexpr (kHasScales<kForm>) weights.scales = *reinterpret_cast<const float2*>(stage.scales + lane % 4 * 2);
    __syncwarp();
    if (lane == 0) arrive(shared.empty[slot]);
  }

  // Multiply it; of two sums the chains of instructions overlap.
  __device__ float2 multiply(const Weights& weights) const {
    GroupSums<kForm> sums[2];
#pragma unroll
    for (int i = 0; i < chunks; i++)
      if (has(i)) sums[i % 2].add(weights.of[i], x[i]);
    const float2 one = sums[0].total(), other = sums[1].total();
    return {(one.x + other.x) * weights.scales.x, (one.y + other.y) * weights.scales.y};
  }
};

// Clear a warp's sums of groups of weight rows.
template <class S>
__device__ inline void clear_sums(int groups, RowStepShared<S>& shared) {
  const int thread = fresh_thread();
  for (int i = thread % 32; i < groups * kStageRows; i += 32)
    shared.sums[i / kStageRows][thread / 32][i % kStageRows] = 0;
  __syncwarp();
}

// Multiply a stage of each group with a turn's input, and add that, times a factor, to the warp's sums. first: the
// turn's k in the input; done: stages so far.
template <class S, Form kForm, int kTurnK>
__device__ inline void multiply_turn(int groups, int first, float factor, unsigned& done, RowStepShared<S>& shared) {
  using Part = TurnPart<S, kForm, kTurnK>;
  const int thread = fresh_thread(), warp = thread / 32, lane = thread % 32;
  const Part part(first, shared);
  if (groups == 0) return;
  typename Part::Weights weights, next;
  Part::take(done, weights, shared);
#pragma unroll 1
  for (int group = 0; group < groups; group++) {
    if (group + 1 < groups) Part::take(done + group + 1, next, shared);
    const float2 sums = part.multiply(weights);
    float2& total = *reinterpret_cast<float2*>(&shared.sums[group][warp][lane % 4 * 2]);
    if (lane < 4) total.x += sums.x * factor, total.y += sums.y * factor;
    weights = next;
  }
  done += groups;
}

// Multiply groups of weight rows with the input; leaves each warp's sums. done: stages so far.
template <class S, Form kForm, int kK>
__device__ inline void multiply_groups(GroupShare share, unsigned& done, RowStepShared<S>& shared) {
  constexpr int full = kStageK<kForm>, rest = kK % full;
  clear_sums(share.count(), shared);
#pragma unroll 1
  for (int turn = 0; turn < kK / full; turn++)
    multiply_turn<S, kForm, full>(share.count(), turn_start<kForm, kK>(turn), 1, done, shared);
  if constexpr (rest) multiply_turn<S, kForm, rest>(share.count(), kK - rest, 1, done, shared);
}

// Let a function multiply groups of weight rows, and all threads finish some of them together.
template <class Multiply, class Finish>
__device__ inline void run_product(GroupShare share, Multiply multiply, Finish finish) {
  share.take_parts([&](GroupShare some) {
    sync_warps<kStepWarps>();
    multiply(some);
    sync_warps<kStepWarps>();
    finish(some);
  });
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
