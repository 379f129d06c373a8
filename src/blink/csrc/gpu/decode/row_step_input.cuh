// SPDX-License-Identifier: Apache-2.0
// Inputs of row_step.cuh's products: taken from the words in which blocks have handed them over, normalised and brought
// to the form that the weights want.
#pragma once

#include "row_step_shape.cuh"

namespace blink {

template <class S>
__device__ inline float norm_rate(float eps, const RowStepShared<S>& shared) {
  float squares = 0;
#pragma unroll
  for (int warp = 0; warp < kStepWarps; warp++) squares += shared.squares[warp];
  return rsqrtf(squares / S::hidden + eps);
}

template <class S>
__device__ inline void keep_squares(float squares, RowStepShared<S>& shared) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  if (threadIdx.x % 32 == 0) shared.squares[threadIdx.x / 32] = squares;
}

// Some pieces of a product's input: a thread's i-th has 8 consecutive k and those 16 further on.
template <int kPieces, int kTurns>
struct Pieces {
  unsigned pairs[kTurns][8];

  __device__ static int piece(int i) { return i * kStepThreads + int(threadIdx.x); }
  __device__ static int place(int piece) { return piece / 2 * 32 + piece % 2 * 8; }

  // Take them from words, times the norm's weights if there are any; return the sum of squares before.
  template <bool kNorm>
  __device__ float take(const Word* from, unsigned tag, const Bf16* norm) {
    constexpr int at_once = kTurns < 4 ? kTurns : 4;
    float squares = 0;
#pragma unroll
    for (int first = 0; first < kTurns; first += at_once) {
      Word words[at_once][4][2];
      Vec16 weights[kNorm ? at_once : 1][2];
#pragma unroll
      for (int i = 0; i < at_once && first + i < kTurns; i++) {
        const int at = place(min(piece(first + i), kPieces - 1));
        if (kNorm)
          for (int j = 0; j < 2; j++) weights[i][j] = *reinterpret_cast<const Vec16*>(norm + at + j * 16);
#pragma unroll
        for (int j = 0; j < 4; j++) load_words(from + at / 2 + j / 2 * 8 + j % 2 * 2, words[i][j]);
      }
#pragma unroll
      for (int i = 0; i < at_once && first + i < kTurns; i++) {
        const int at = place(min(piece(first + i), kPieces - 1));
        unsigned (&own)[8] = pairs[first + i];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          await_words(from + at / 2 + j / 2 * 8 + j % 2 * 2, tag, words[i][j]);
          own[j * 2] = unsigned(words[i][j][0]), own[j * 2 + 1] = unsigned(words[i][j][1]);
        }
        if (kNorm) squares += normalize(own, weights[i], piece(first + i) < kPieces);
      }
    }
    return squares;
  }

  __device__ static float normalize(unsigned (&pairs)[8], const Vec16 (&norm)[2], bool counts) {
    float squares = 0;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      unsigned weights[4];
      to_words(norm[j], weights);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (counts) squares += square_sum(pairs[j * 4 + i]);
        pairs[j * 4 + i] = multiply_pairs(pairs[j * 4 + i], weights[i]);
      }
    }
    return squares;
  }
};

template <int kMostK>
__device__ inline void keep_cut(const unsigned (&pairs)[8], int piece, Input<kMostK>& x) {
  const Int4Group group = cut_group(pairs, [&](int lane, uint2 halves) {
    reinterpret_cast<uint2*>(&x.cut.whole[piece / 2][lane])[piece % 2] = halves;
  });
  if (piece % 8 == 0) x.cut.groups[piece / 8] = group;
}

// Find the scale of all the block's f16.
template <class S, int kPieces, int kTurns>
__device__ inline HalfScale scale_pieces(const Pieces<kPieces, kTurns>& pieces, RowStepShared<S>& shared) {
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < kTurns; i++)
#pragma unroll
    for (const unsigned pair : pieces.pairs[i]) largest = __vmaxu2(largest, pair & 0x7fff7fffu);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, step));
  if (threadIdx.x % 32 == 0) shared.largest[threadIdx.x / 32] = largest;
  sync_warps<kStepWarps>();
#pragma unroll
  for (int warp = 0; warp < kStepWarps; warp++) largest = __vmaxu2(largest, shared.largest[warp]);
  return HalfScale(largest);
}

// Take a product's input from words, times the norm's weights if there are any.
template <class S, Form kForm, int kK, bool kNorm>
__device__ inline void take_input(const Word* from, unsigned tag, const Bf16* norm, RowStepShared<S>& shared) {
  static_assert(kForm != Form::kInt4 || kK % 512 == 0);  // eight lanes cut a group, and all lanes take part
  constexpr int count = kK / 16, turns = (count + kStepThreads - 1) / kStepThreads;
  Pieces<count, turns> pieces;
  const float squares = pieces.template take<kNorm>(from, tag, norm);
  if (kNorm) keep_squares(squares, shared);
  HalfScale scale(0);
  if constexpr (kHasScales<kForm>) {
    scale = scale_pieces(pieces, shared);
    if (threadIdx.x == 0) shared.inverse[kNorm] = scale.inverse;
  }
#pragma unroll
  for (int i = 0; i < turns; i++) {
    const int piece = pieces.piece(i);
    if (piece >= count) break;
    const unsigned (&pairs)[8] = pieces.pairs[i];
    if constexpr (kForm == Form::kBf16) {
      const int at = pieces.place(piece) / 8;
      shared.x.plain[at] = {pairs[0], pairs[1], pairs[2], pairs[3]};
      shared.x.plain[at + 2] = {pairs[4], pairs[5], pairs[6], pairs[7]};
    } else if constexpr (kForm == Form::kFp8Rows) {
      const int at = pieces.place(piece) / 8;
      shared.x.plain[at] = {scale.convert(pairs[0]), scale.convert(pairs[1]), scale.convert(pairs[2]),
                            scale.convert(pairs[3])};
      shared.x.plain[at + 2] = {scale.convert(pairs[4]), scale.convert(pairs[5]), scale.convert(pairs[6]),
                                scale.convert(pairs[7])};
    } else if constexpr (kForm == Form::kFp8) {
      // Of 32 k a lane has in turn the pair of each 8.
      for (int j = 0; j < 8; j++)
        reinterpret_cast<unsigned*>(&shared.x.halves[piece / 2][j % 4])[piece % 2 + j / 4 * 2] =
            scale.convert(pairs[j]);
    } else {
      keep_cut(pairs, piece, shared.x);
    }
  }
}

}  // namespace blink
