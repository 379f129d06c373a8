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

// A product's input, of so many pieces: of a turn each thread makes one, 8 consecutive k and those 16 further on.
template <int kPieces>
struct InputPieces {
  static constexpr int turns = (kPieces + kStepThreads - 1) / kStepThreads;

  __device__ static int piece(int thread, int turn) { return turn * kStepThreads + thread; }
  __device__ static int place(int piece) { return piece / 2 * 32 + piece % 2 * 8; }

  // The k of which a lane has four words' numbers: a warp reads words of its pieces' k without gaps.
  __device__ static int place_of_words(int thread, int turn, int part) {
    return piece(thread, turn) / 32 * 512 + part * 128 + thread % 32 * 4;
  }

  // What is known of an input once it is there.
  struct Found {
    float squares = 0;     // the sum of a thread's before the norm
    unsigned largest = 0;  // of a thread's pairs
  };

  // Bring it from words to shared memory, times the norm's weights if there are any. As bf16 that are not converted the
  // middle two pairs of each four change places: the matrix instruction wants them so.
  template <Form kForm, bool kNorm>
  __device__ static Found bring(const Word* from, unsigned tag, const Bf16* norm, Vec16* to) {
    constexpr int at_once = turns < 4 ? turns : 4, last = kPieces * 16 - 4;
    const int thread = fresh_thread();
    Found found;
#pragma unroll 1
    for (int first = 0; first < turns; first += at_once) {
      Word words[at_once * 4][2];
      await_words(words, tag,
                  [&](int i) { return from + min(place_of_words(thread, first + i / 4, i % 4), last) / 2; });
#pragma unroll
      for (int i = 0; i < at_once * 4; i++) {
        const int at = place_of_words(thread, first + i / 4, i % 4);
        if (at <= last) keep<kForm, kNorm>({unsigned(words[i][0]), unsigned(words[i][1])}, at / 4, norm, to, found);
      }
    }
    __syncwarp();
    return found;
  }

  template <Form kForm, bool kNorm>
  __device__ static void keep(uint2 pairs, int four, const Bf16* norm, Vec16* to, Found& found) {
    if (kNorm) {
      found.squares += square_sum(pairs.x) + square_sum(pairs.y);
      const uint2 weights = reinterpret_cast<const uint2*>(norm)[four];
      pairs = {multiply_pairs(pairs.x, weights.x), multiply_pairs(pairs.y, weights.y)};
    }
    found.largest = __vmaxu2(found.largest, __vmaxu2(pairs.x & 0x7fff7fffu, pairs.y & 0x7fff7fffu));
    if constexpr (kForm == Form::kBf16) {
      unsigned* words = reinterpret_cast<unsigned*>(to + four / 2) + four % 2;
      words[0] = pairs.x, words[2] = pairs.y;
    } else {
      reinterpret_cast<uint2*>(to)[four] = pairs;
    }
  }
};

template <int kMostK>
__device__ inline void keep_cut(const unsigned (&pairs)[8], int piece, Input<kMostK>& x) {
  const Int4Group group = cut_group(pairs, [&](int lane, uint2 halves) {
    reinterpret_cast<uint2*>(&x.cut.whole[piece / 2][lane])[piece % 2] = halves;
  });
  if (piece % 8 == 0) x.cut.groups[piece / 8] = group;
}

// Find the scale of all the block's f16 from a thread's largest.
template <class S>
__device__ inline HalfScale find_scale(unsigned largest, RowStepShared<S>& shared) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, step));
  if (threadIdx.x % 32 == 0) shared.largest[threadIdx.x / 32] = largest;
  sync_warps<kStepWarps>();
#pragma unroll
  for (int warp = 0; warp < kStepWarps; warp++) largest = __vmaxu2(largest, shared.largest[warp]);
  return HalfScale(largest);
}

// Make of a piece of bf16, if there is one, what weights want, in its place. The warp's lanes have pieces of the same
// k.
template <Form kForm, int kMostK>
__device__ inline void convert_piece(bool mine, int piece, int at, HalfScale scale, Input<kMostK>& x) {
  unsigned pairs[8];
#pragma unroll
  for (int i = 0; i < 2 && mine; i++) to_words(x.plain[at / 8 + i * 2], pairs + i * 4);
  __syncwarp();
  if (!mine) return;
  if constexpr (kForm == Form::kInt4) {
    keep_cut(pairs, piece, x);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const unsigned half = scale.convert(pairs[i]);
      // Of 32 k of packed weights a lane has in turn the pair of each 8. The middle two of four change places.
      if constexpr (kForm == Form::kFp8)
        reinterpret_cast<unsigned*>(&x.halves[piece / 2][i % 4])[i / 4 + piece % 2 * 2] = half;
      else
        reinterpret_cast<unsigned*>(x.plain + at / 8 + i / 4 * 2)[i % 4 / 2 + i % 2 * 2] = half;
    }
  }
}

// Take a product's input from words, times the norm's weights if there are any.
template <class S, Form kForm, int kK, bool kNorm>
__device__ inline void take_input(const Handover& handover, const Word* from, const Bf16* norm,
                                  RowStepShared<S>& shared) {
  static_assert(kK % 32 == 0 && (kForm != Form::kInt4 || kK % 512 == 0));  // all lanes cut groups, by eights
  using Pieces = InputPieces<kK / 16>;
  handover.await<kStepWarps>();
  const auto found = Pieces::template bring<kForm, kNorm>(from, handover.count, norm, shared.x.plain);
  if (kNorm) keep_squares(found.squares, shared);
  if constexpr (kForm == Form::kBf16) return;
  HalfScale scale(0);
  if constexpr (kHasScales<kForm>) {
    scale = find_scale(found.largest, shared);
    if (threadIdx.x == 0) shared.inverse[kNorm] = scale.inverse;
  }
#pragma unroll 1
  for (int turn = 0; turn < Pieces::turns; turn++) {
    const int piece = Pieces::piece(fresh_thread(), turn);
    convert_piece<kForm>(piece < kK / 16, piece, Pieces::place(piece), scale, shared.x);
  }
}

}  // namespace blink
