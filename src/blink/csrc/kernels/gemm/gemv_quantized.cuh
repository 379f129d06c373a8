// SPDX-License-Identifier: Apache-2.0
// gemv.cuh's GEMMs with FP8 weights: half of the bytes through the same pipeline, f16 in registers. What it shares with
// those of 4 bits, gemv_int4.cuh, knows both formats.
#pragma once

#include "kernels/common/quantized.cuh"
#include "kernels/gemm/gemv.cuh"

namespace blink {

// As GemvShape; a lane takes 32 bytes of each unit. Without kGrouped each weight row has a scale.
template <FormatId kFormat_, bool kGrouped_, int kRows_, int kK_, int kWarps_, int kCluster_, int kSlices_, int kTile_,
          int kStageRows_, int kStages_, Output kOutput_, bool kNorm_, class Norm_ = Bf16>
struct QuantizedGemvShape {
  using Norm = Norm_;
  static constexpr FormatId format = kFormat_;
  static constexpr int rows = kRows_, k = kK_, warps = kWarps_, cluster = kCluster_, slices = kSlices_, tile = kTile_;
  static constexpr int stage_rows = kStageRows_, stages = kStages_;
  static constexpr Output output = kOutput_;
  static constexpr bool norm = kNorm_, grouped = kGrouped_, scaled = !grouped;
  static constexpr bool folded = rows * slices <= 8;  // few rows leave half of the instruction's rows free
  static constexpr int slots = (folded ? 8 : 16) / slices, group = 8 / slices, walk = group;
  static constexpr int unit = kUnit<kFormat_>, span = unit * slices;
  static constexpr int block_k = k / cluster, steps = block_k / (span * warps), parts = folded ? 1 : 2;
  static constexpr int row_bytes = k / unit * kUnitBytes, block_bytes = row_bytes / cluster;
  static constexpr int outputs = output == Output::kGate ? tile / 2 : tile;
  static constexpr int turns = tile / stage_rows;
  static constexpr int pitch = block_bytes / 2 + (group > 1 ? 32 : 0);
  static constexpr int partials = warps * slices;
  static constexpr int threads = 32 * (warps + 1);
  static constexpr int share = outputs / cluster;
  static constexpr int outputs_per_thread = (rows * share + 32 * warps - 1) / (32 * warps);
  static constexpr int unit_steps = unit / 16;     // of the matrix instruction
  static constexpr int groups = block_k / kGroup;  // of a weight row
  static_assert(rows <= slots && slots <= 8 && steps * span * warps * cluster == k);
  static_assert(turns * stage_rows == tile && stage_rows % group == 0 && outputs % cluster == 0);
  static_assert(grouped || kFormat_ == FormatId::kFp8);
};

template <class S>
struct QuantizedGemvShared : GemvShared<S> {
  unsigned groups[S::grouped ? S::tile : 1][S::grouped ? S::groups : 1];
};

// Load the words of the tile's groups, which no kernel of the step writes.
template <class S>
__device__ inline void prepare(const GemvArgs& args, int tile, int rank, QuantizedGemvShared<S>& shared) {
  if constexpr (S::grouped) {
    const int first = min(tile * S::outputs, args.n - S::outputs);
    for (int at = threadIdx.x; at < S::tile * S::groups; at += S::threads) {
      const int in_tile = at / S::groups, group = at % S::groups;
      const int row = first + (in_tile < S::outputs ? in_tile : in_tile - S::outputs + args.n);
      shared.groups[in_tile][group] = args.groups[long(row) * (S::k / kGroup) + rank * S::groups + group];
    }
  }
}

template <class S>
struct QuantizedActivations {  // a warp's part of them, as the matrix instruction takes them
  unsigned values[S::steps][S::parts][S::unit_steps][2];
};

// As load_activations(), but for the weights' order words instead of vectors.
template <class S>
__device__ inline void load_words(const GemvArgs& args, int first_k, int warp, QuantizedActivations<S>& to,
                                  GemvShared<S>& shared) {
  const int lane = threadIdx.x % 32, row = lane / 4;
  const int k = first_k + row / S::slots * S::unit + lane % 4 * 2;
  const Bf16* from = args.x + long(min(row % S::slots, S::rows - 1)) * S::k;
  float square_sums = 0;
#pragma unroll
  for (int step = 0; step < S::steps; step++)
#pragma unroll
    for (int part = 0; part < S::parts; part++)
#pragma unroll
      for (int i = 0; i < S::unit_steps * 2; i++) {
        const int place = k + step * S::span + part * (8 / S::slots * S::unit) + i * 8;
        unsigned& value = to.values[step][part][i / 2][i % 2];
        value = load_word(from + place);
        if constexpr (S::norm) {
          square_sums += square_sum(value);
          value = normalize(value, norm_of<S>(args) + place);
        }
      }
  if constexpr (S::norm) keep_square_sums<S>(square_sums, warp, shared);
}

// Make f16 of a lane's activations, times the power of 2 that brings their row's largest to 2^14; return its inverse.
template <class S>
__device__ inline float scale_words(QuantizedActivations<S>& x) {
  constexpr int count = S::steps * S::parts * S::unit_steps * 2;
  unsigned* words = &x.values[0][0][0][0];
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < count; i++) largest = __vmaxu2(largest, words[i] & 0x7fff7fffu);
#pragma unroll
  for (int step = 1; step < 32; step *= 2)
    if (step < 4 || step >= 4 * S::slots) largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, step));
  const HalfScale scale(largest);
#pragma unroll
  for (int i = 0; i < count; i++) words[i] = scale.convert(words[i]);
  return scale.inverse;
}

// Multiply 16 bytes of a lane. Sums of even and odd steps; folded, the first's are those of the
// instruction's rows 0 to 7, the others' those of its rows 8 to 15.
template <class S>
__device__ inline void multiply_chunk(Vec16 chunk, const unsigned (&a)[S::unit_steps][2],
                                      const unsigned (&c)[S::unit_steps][2], int first_step, float (&sums)[2][4]) {
  const unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    unsigned b[1][2];
    dequantize_half<FormatId::kFp8>(words[i], 0, b);
    const int step = first_step + i, even = step & ~1;
    if constexpr (S::folded)
      multiply_add_halves(sums[step % 2], a[even][0], a[even + 1][0], a[even][1], a[even + 1][1], b[0][0], b[0][1]);
    else
      multiply_add_halves(sums[step % 2], a[step][0], c[step][0], a[step][1], c[step][1], b[0][0], b[0][1]);
  }
}

template <class S>
__device__ inline void add_scaled(float (&totals)[4], float (&sums)[2][4], float low, float high) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (!S::folded) totals[i] += (sums[0][i] + sums[1][i]) * (i % 2 ? high : low);
    if (S::folded && i < 2) totals[i] += (sums[0][i] + sums[1][i + 2]) * (i % 2 ? high : low);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) sums[0][i] = sums[1][i] = 0;
}

// Multiply one group of a stage's weight rows; what counts of the results goes to the warp's sums.
template <class S>
__device__ inline void multiply_units(const Bf16* weights, const QuantizedActivations<S>& x, float scale, int warp,
                                      int in_tile, QuantizedGemvShared<S>& shared) {
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
  const char* from =
      reinterpret_cast<const char*>(weights + row % S::group * S::pitch) + row / S::group * kUnitBytes + lane % 4 * 32;
  const auto group_of = [&](int of, int step) {  // the scale of one of the two rows whose sums this lane gets
    const int at = (warp * S::steps + step) * S::slices + of / S::group;
    return __uint_as_float(shared.groups[in_tile + of % S::group][at]);
  };
  float totals[4] = {}, sums[2][4] = {};
#pragma unroll
  for (int step = 0; step < S::steps; step++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const Vec16 chunk = *reinterpret_cast<const Vec16*>(from + step * S::slices * kUnitBytes + half * 16);
      multiply_chunk<S>(chunk, x.values[step][0], x.values[step][S::parts - 1], half * S::unit_steps / 2, sums);
    }
    if constexpr (S::grouped) add_scaled<S>(totals, sums, group_of(column, step), group_of(column + 1, step));
  }
  if constexpr (!S::grouped) add_scaled<S>(totals, sums, 1, 1);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int slice = (column + i) / S::group, token = row % S::slots;
    if (token >= S::rows) continue;
    float* to = &shared.sums[warp * S::slices + slice][token][in_tile + (column + i) % S::group];
    if (row / S::slots == slice) *to = totals[i] * scale;
    if (!S::folded && (row + 8) / S::slots == slice) *to = totals[i + 2] * scale;
  }
}

template <class S>
__device__ inline void multiply_weights(const GemvArgs& args, int rank, int warp, QuantizedGemvShared<S>& shared) {
  const int warp_k = warp * S::steps * S::span, warp_bytes = S::block_bytes / S::warps;
  QuantizedActivations<S> x;
  load_words<S>(args, rank * S::block_k + warp_k, warp, x, shared);
  const float scale = scale_words<S>(x);
  walk_pipeline<S>(shared, [&](const Bf16* weights, int in_tile) {
    multiply_units<S>(weights + warp * (warp_bytes / 2), x, scale, warp, in_tile, shared);
  });
}

template <bool kGrouped, int kRows, int kK, int kWarps, int kCluster, int kSlices, int kTile, int kStageRows,
          int kStages, Output kOutput, bool kNorm, class Norm = Bf16>
__global__ void __launch_bounds__(32 * (kWarps + 1), kWarps <= 4 ? 3 : 2) gemv_quantized(const GemvArgs args) {
  using S = QuantizedGemvShape<FormatId::kFp8, kGrouped, kRows, kK, kWarps, kCluster, kSlices, kTile, kStageRows,
                               kStages, kOutput, kNorm, Norm>;
  extern __shared__ __align__(1024) char memory[];
  compute_gemv<S>(args, *reinterpret_cast<QuantizedGemvShared<S>*>(memory));
}

}  // namespace blink
