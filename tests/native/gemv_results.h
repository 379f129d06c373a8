// SPDX-License-Identifier: Apache-2.0
// In place of kernels/gemm's GEMVs: blocks that have sums already, and the epilogue that push_gemv.cu gives them.
#pragma once

#include "kernels/args.h"

namespace blink {

enum class Output { kStore };

template <int kRows, int kWarps, int kCluster, int kTile, Output kOutput, bool kNorm, bool kScaled>
struct ResultShape {
  static constexpr int rows = kRows, warps = kWarps, cluster = kCluster, tile = kTile, outputs = kTile;
  static constexpr int share = outputs / cluster;
  static constexpr int outputs_per_thread = (rows * share + 32 * warps - 1) / (32 * warps);
  static constexpr Output output = kOutput;
  static constexpr bool norm = kNorm, scaled = kScaled;
};

template <int kRows, int, int kWarps, int kCluster, int, int kTile, int, int, Output kOutput, bool kNorm>
using GemvShape = ResultShape<kRows, kWarps, kCluster, kTile, kOutput, kNorm, false>;
template <FormatId, bool kGrouped, int kRows, int, int kWarps, int kCluster, int, int kTile, int, int, Output kOutput,
          bool kNorm>
using QuantizedGemvShape = ResultShape<kRows, kWarps, kCluster, kTile, kOutput, kNorm, !kGrouped>;
template <int kRows, int, int kWarps, int kCluster, int, int kTile, int, int, Output kOutput, bool kNorm>
using Int4GemvShape = ResultShape<kRows, kWarps, kCluster, kTile, kOutput, kNorm, false>;
template <int>
constexpr int kInt4Blocks = 1;

template <class S>
struct GemvShared {
  float from_blocks[S::cluster][S::rows][S::share + 1];
};
template <class S>
using QuantizedGemvShared = GemvShared<S>;
template <class S>
using Int4GemvShared = GemvShared<S>;
template <class S>
struct Outputs;

// What a block of a cluster has of an output.
inline float part_of(int block, int row, int output) { return float((block + 3) * (row + 5) * (output + 7) % 101) / 3; }

template <class S, class Args>
void compute_gemv(const Args& args, GemvShared<S>& shared) {
  const int rank = block_rank, tile = blockIdx.x / S::cluster;
  if (threadIdx.x == 0)
    for (int block = 0; block < S::cluster; block++)
      for (int row = 0; row < S::rows; row++)
        for (int i = 0; i < S::share; i++)
          shared.from_blocks[block][row][i] = part_of(block, row, tile * S::tile + rank * S::share + i);
  Outputs<S> to = {};
  if (int(threadIdx.x) < 32 * S::warps) to = load_addends<S>(args, tile, rank);
  __syncthreads();
  write_outputs<S>(args, shared, to);
}

}  // namespace blink
