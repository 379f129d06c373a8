// SPDX-License-Identifier: Apache-2.0
// The epilogue of a GEMM: blocks of a cluster exchange their sums, each for some of the outputs. They add a bias or the
// residual, or apply the gate. With the residual come the inputs of the next norm.
//
// Several kernels are to round alike (gemm_in_tiles). So the compiler does not choose which operations it fuses: the
// code says so.
#pragma once

#include "kernels/args.h"
#include "kernels/common/hi_lo.cuh"

namespace blink {

template <int kTokens_, int kGroups_, int kCluster_, Output kOutput_, bool kNorm_, bool kScaled_ = false,
          FormatId kWrites_ = FormatId::kBf16, int kInstruction_ = 0>
struct OutputShape {
  static constexpr int tokens = kTokens_, groups = kGroups_, cluster = kCluster_;
  static constexpr Output output = kOutput_;
  static constexpr bool norm = kNorm_, scaled = kScaled_;
  static constexpr FormatId writes = kWrites_;
  // Tiles of tokens are blocks of their own, and each instruction multiplies so many tokens.
  static constexpr bool tiled = kInstruction_ > 0;
  static constexpr int instruction = tiled ? kInstruction_ : tokens, instructions = tokens / instruction;
  static constexpr int threads = 128 * groups;  // that multiply
  static constexpr int tile = 64 * groups;      // weight rows of a block
  static constexpr int halves = output == Output::kGate ? 2 : 1;
  static constexpr int outputs = tile / halves;
  static constexpr int share = outputs / cluster;  // that one block of a cluster writes
  static constexpr int pairs = share / 2;
  static constexpr int pairs_per_thread = (tokens * pairs + threads - 1) / threads;
  static constexpr int exchanged = cluster * tokens * (halves * share + norm) * 4;  // bytes that a block gets
  static_assert(tokens % instruction == 0 && instruction % 8 == 0);
  static_assert(tokens % 8 == 0 && share % 16 == 0 && threads % pairs == 0);
  static_assert((output != Output::kAdd || pairs <= 32) && (output != Output::kStore || writes == FormatId::kBf16));
};

// Where a block's outputs are.
struct OutputPlace {
  int rank, tile;           // in the cluster; of weight rows
  int first_token, tokens;  // of the block's tile; all of the kernel's, rounded up
};

// Sums from each block of the cluster, for the outputs that this one writes: of 8 tokens and 16 weight rows four that a
// lane has together, the lanes of a token's neighbours side by side, and one place left free, against conflicts.
template <class S>
struct Parts {
  float4 sums[S::cluster][S::tokens / 8][S::halves * S::share / 16][33];

  // What a block has of a weight row and the next.
  __device__ float2 pair(int block, int token, int row) const {
    const float4& lane = sums[block][token / 8][row / 16][token % 8 / 2 * 8 + row % 8];
    const float* sum = &lane.x + row % 16 / 8 * 2 + token % 2;
    return {sum[0], sum[4]};
  }
};

// Send a warpgroup's sums, in multiply_boxes()' order, to the blocks that write the outputs.
template <class S>
__device__ inline void send_sums(int rank, const float (&sums)[S::tokens / 2], Parts<S>& parts, Barrier& exchanged) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16, output = row % S::outputs;
  const int rows = output % S::share / 16 + row / S::outputs * (S::share / 16);
  float4& own = parts.sums[rank][0][rows][lane % 4 * 8 + lane / 4];
  const unsigned to = address_in(output / S::share, &own), barrier = address_in(output / S::share, &exchanged);
#pragma unroll
  for (int i = 0; i < S::tokens / 8; i++) {
    const float4 values = {sums[i * 4], sums[i * 4 + 1], sums[i * 4 + 2], sums[i * 4 + 3]};
    if constexpr (S::cluster > 1)
      store_counted(to + i * sizeof(parts.sums[0][0]), barrier, values);
    else
      (&own)[i * sizeof(parts.sums[0][0]) / sizeof(own)] = values;
  }
}

// Add up this block's part of an instruction's partial sums of squares; a warp's lanes hold four tokens each, the same
// again every S::instruction / 4 lanes, that rounded up to a power of two. Where lanes have one part each, more are
// under way.
template <class S>
__device__ inline float4 add_square_sums(const OutputArgs& args, const OutputPlace& at, int instruction) {
  constexpr int used = S::instruction / 4, width = used > 16 ? 32 : used > 8 ? 16 : used > 4 ? 8 : used;
  constexpr int at_once = 32 / width, batch = at_once > 1 ? 8 : 16;
  static_assert(used <= width && 32 % width == 0);
  const int lane = threadIdx.x % 32;
  const bool idle = used < width && lane % width >= used;
  const float* from = args.square_sums + at.first_token + instruction * S::instruction + lane % width * 4;
  const int end = args.num_square_sums * (at.rank + 1) / S::cluster;
  float sums[4] = {};
  for (int i = args.num_square_sums * at.rank / S::cluster + lane / width; i < end; i += at_once * batch) {
    Vec16 parts[batch];
#pragma unroll
    for (int j = 0; j < batch; j++) {
      const int part = i + j * at_once;
      parts[j] = part < end && !idle ? load(from + long(part) * at.tokens) : Vec16{};
    }
#pragma unroll
    for (int j = 0; j < batch; j++) {
      sums[0] += __uint_as_float(parts[j].x), sums[1] += __uint_as_float(parts[j].y);
      sums[2] += __uint_as_float(parts[j].z), sums[3] += __uint_as_float(parts[j].w);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int step = 16; step >= width; step /= 2) sums[i] += __shfl_xor_sync(~0u, sums[i], step);
  return {sums[0], sums[1], sums[2], sums[3]};
}

template <class S>
__device__ inline void send_square_sums(int rank, const float4 (&sums)[S::instructions],
                                        float (&square_sums)[S::cluster][S::tokens], Barrier& exchanged) {
  const int lane = threadIdx.x % 32;
  if (lane >= S::instruction / 4) return;
#pragma unroll
  for (int i = 0; i < S::instructions; i++) {
    float4& own = reinterpret_cast<float4&>(square_sums[rank][i * S::instruction + lane * 4]);
    for (int to = 0; to < S::cluster; to++) send<S::cluster>(to, sums[i], own, exchanged);
  }
}

// What a thread's outputs are added to, loaded long before. The thread has the same two outputs of several tokens.
template <class S>
struct Addends {
  unsigned residual[S::pairs_per_thread];
  unsigned bias, next_norm;
  float scales[2], up_scales[2];
};

template <class S>
__device__ inline int first_output(const OutputPlace& at) {
  return at.tile * S::outputs + at.rank * S::share + int(threadIdx.x) % S::pairs * 2;
}

template <class S>
__device__ inline Addends<S> load_addends(const OutputArgs& args, const OutputPlace& at) {
  const int output = first_output<S>(at);
  Addends<S> to = {};
  if (output >= args.n) return to;
  if constexpr (S::scaled)
    for (int i = 0; i < 2; i++) {
      to.scales[i] = args.scales[output + i];
      if (S::output == Output::kGate) to.up_scales[i] = args.scales[output + i + args.n];
    }
  if (S::output != Output::kGate && args.bias) to.bias = *reinterpret_cast<const unsigned*>(args.bias + output);
  if (S::output != Output::kAdd) return to;
  to.next_norm = *reinterpret_cast<const unsigned*>(args.next_norm + output);
#pragma unroll
  for (int i = 0; i < S::pairs_per_thread; i++) {
    const int token = at.first_token + (i * S::threads + int(threadIdx.x)) / S::pairs;
    if (token < args.rows)
      to.residual[i] = *reinterpret_cast<const volatile unsigned*>(args.out + long(token) * args.n + output);
  }
  return to;
}

// Write a pair of what the next GEMM reads.
template <class S>
__device__ inline void write_next(const OutputArgs& args, Bf16* to, int token, int output, unsigned pair) {
  if constexpr (S::writes != FormatId::kBf16)
    write_columns<S::writes>(to, long(args.rows) * args.n, long(token) * args.n, output, pair);
  else
    *reinterpret_cast<unsigned*>(to + long(token) * args.n + output) = pair;
}

template <class S>
__device__ inline void write_outputs(const OutputArgs& args, const OutputPlace& at, const Parts<S>& parts,
                                     const float (&square_sums)[S::cluster][S::tokens], const Addends<S>& addends) {
  const int output = first_output<S>(at), in_share = threadIdx.x % S::pairs * 2;
#pragma unroll
  for (int i = 0; i < S::pairs_per_thread; i++) {
    const int in_tile = (i * S::threads + int(threadIdx.x)) / S::pairs, token = at.first_token + in_tile;
    if (in_tile >= S::tokens) break;
    const bool writes = token < args.rows && output < args.n;
    float values[2] = {}, ups[2] = {}, square = 0;
#pragma unroll
    for (int block = 0; block < S::cluster; block++) {
      const float2 sums = parts.pair(block, in_tile, in_share);
      values[0] += sums.x, values[1] += sums.y;
      if constexpr (S::output == Output::kGate) {
        const float2 of_up = parts.pair(block, in_tile, in_share + S::share);
        ups[0] += of_up.x, ups[1] += of_up.y;
      }
      if (S::norm) square += square_sums[block][in_tile];
    }
    const float rate = S::norm ? rsqrtf(__fmaf_rn(square, args.per_k, args.eps)) : 1;
    if (S::norm && args.inverse_rms && output == 0 && token < args.rows) args.inverse_rms[token] = rate;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if constexpr (S::scaled)
        values[j] = __fmul_rn(values[j], addends.scales[j]), ups[j] = __fmul_rn(ups[j], addends.up_scales[j]);
      if (S::output == Output::kGate) {
        values[j] = silu(values[j] * rate) * ups[j] * rate;
      } else {
        const float added = j ? high_float(addends.bias) + high_float(addends.residual[i])
                              : low_float(addends.bias) + low_float(addends.residual[i]);
        values[j] = __fmaf_rn(values[j], rate, added);
      }
    }
    const unsigned pair = to_bf16_pair(values[0], values[1]);
    if (S::output == Output::kGate) {
      if (writes) write_next<S>(args, args.out, token, output, pair);
      continue;
    }
    if (writes) *reinterpret_cast<unsigned*>(args.out + long(token) * args.n + output) = pair;
    if (S::output != Output::kAdd) continue;
    const float low = low_float(pair), high = high_float(pair);
    const unsigned next = to_bf16_pair(low * low_float(addends.next_norm), high * high_float(addends.next_norm));
    if (writes) write_next<S>(args, args.next_x, token, output, next);
    float sum = writes ? __fmaf_rn(low, low, __fmul_rn(high, high)) : 0;
#pragma unroll
    for (int step = 1; step < S::pairs; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % S::pairs == 0)
      args.next_square_sums[long(at.tile * S::cluster + at.rank) * at.tokens + token] = sum;
  }
}

}  // namespace blink
