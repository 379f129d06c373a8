// SPDX-License-Identifier: Apache-2.0
// GEMMs of weights of 4 bits with the tokens of prompts, on Hopper. A block takes 128 weight rows and up to 256
// tokens. Each of two warpgroups makes operands of 64 rows in registers, one word ahead of the GEMMs of the tensor
// cores; a third copies weights and tokens ahead. Blocks of a cluster share k, and then exchange their sums. Of gates
// and ups a tile has 64 each, in eights by turns: a lane's upper row is a gate, and its lower one the gate's up.
//
// Slower on an H100: tokens copied once for two blocks (multicast), four blocks that share k, and persistent blocks
// among which all tiles are dealt out evenly.
#include "kernels/args.h"
#include "kernels/common/pipeline.cuh"
#include "kernels/common/quantized.cuh"
#include "kernels/prefill/warpgroups.cuh"

namespace blink {

constexpr int kTileRows = 128;  // of the weight, 64 for each warpgroup
constexpr int kMultiplyingWarps = 8;
constexpr int kUnitBoxes = kUnit<FormatId::kInt4> / kBoxRow;  // of tokens

// Sizes. kBlocks blocks, one or two, a cluster, share k (split-K).
template <int kTokens, int kBlocks, bool kGated>
struct PrefillGemmShape {
  static constexpr int tokens = kTokens, cluster = kBlocks;
  static constexpr bool gated = kGated;
  static constexpr int outputs = kGated ? kTileRows / 2 : kTileRows;
  static constexpr int sums = kTokens / 2, own_sums = sums / kBlocks;  // of a thread; of those, what it writes
  static constexpr int weight_bytes = kTileRows * kUnitBytes, token_bytes = kTokens * kBoxRow * 2;
  static constexpr int weight_slots = 3, most_bytes = 220 << 10;
  static constexpr int token_slots = (most_bytes - weight_slots * weight_bytes) / token_bytes;
  static_assert(kBlocks <= 2 && kTokens / kBlocks % 16 == 0);
};

// A block's outputs, [tokens, outputs]. Rows are eight longer than that: the same columns of eight of them, which are
// stored at once, lie in other banks.
template <class S>
struct PrefillGemmOutputs {
  float4 others[S::cluster > 1 ? S::own_sums / 4 : 1][kMultiplyingWarps * 32];  // sums of the block that shares k
  Bf16 rows[S::tokens / S::cluster][S::outputs + 8];
};

template <class S>
struct PrefillGemmShared {
  alignas(1024) char weights[S::weight_slots][S::weight_bytes];
  alignas(1024) char tokens[S::token_slots][S::token_bytes];
  uint2 words[2][kTileRows];  // of this turn and of the next
  alignas(8) Barrier full_weights[S::weight_slots], empty_weights[S::weight_slots];
  alignas(8) Barrier full_tokens[S::token_slots], empty_tokens[S::token_slots];

  __device__ PrefillGemmOutputs<S>& outputs() {
    static_assert(sizeof(tokens) >= sizeof(PrefillGemmOutputs<S>));
    return *reinterpret_cast<PrefillGemmOutputs<S>*>(tokens);
  }
};

// A block's tile and its part of k in units. Clusters start at different units of it: see GemmPlace.
template <class S>
struct PrefillGemmPlace {
  int rank, tile, first_token, first_unit, turns, start;

  __device__ explicit PrefillGemmPlace(const PrefillGemmArgs& args) {
    rank = S::cluster > 1 ? int(cluster_rank()) : 0;
    tile = blockIdx.x / S::cluster, first_token = blockIdx.y * S::tokens;
    first_unit = args.units * rank / S::cluster;
    turns = args.units * (rank + 1) / S::cluster - first_unit;
    start = tile * 7;
  }

  __device__ int unit(int turn) const { return first_unit + (start + turn) % turns; }

  // The weight row that a row of the tile is, or the last.
  __device__ long weight_row(int n, int in_tile) const {
    if constexpr (!S::gated) return min(tile * kTileRows + in_tile, n - 1);
    const int output = min(tile * S::outputs + in_tile / 16 * 8 + in_tile % 8, n - 1);
    return in_tile / 8 % 2 * n + output;
  }
};

template <class S>
__device__ inline void copy_unit(const PrefillGemmArgs& args, const PrefillGemmPlace<S>& at, int turn,
                                 PrefillGemmShared<S>& shared) {
  Barrier& full = shared.full_weights[turn % S::weight_slots];
  char* weights = shared.weights[turn % S::weight_slots];
  const int column = at.unit(turn) * kUnitBytes, row = at.tile * S::outputs;
  const unsigned long long policy = gridDim.y == 1 ? read_once_policy() : read_often_policy();
  expect(full, S::weight_bytes);
  if constexpr (S::gated) {
    for (int first = 0; first < S::outputs; first += 8)
      copy_box_3d(weights + 2 * first * kUnitBytes, args.weight, column, row + first, full, policy);
  } else {
    copy_box(weights, args.weight, column, row, full, policy);
  }
}

// What the copying thread does; the pipeline's first weights are under way.
template <class S>
__device__ inline void copy_operands(const PrefillGemmArgs& args, const PrefillGemmPlace<S>& at,
                                     PrefillGemmShared<S>& shared) {
  PipelineState<S::token_slots> tokens;
  for (int turn = 0; turn < at.turns; turn++) {
    const int next = turn + 1;  // whose slot the GEMMs before this turn's have left
    if (next >= S::weight_slots && next < at.turns) {
      wait(shared.empty_weights[next % S::weight_slots], (next / S::weight_slots - 1) % 2);
      copy_unit<S>(args, at, next, shared);
    }
    for (int box = 0; box < kUnitBoxes; box++, tokens.advance()) {
      if (turn * kUnitBoxes + box >= S::token_slots) wait(shared.empty_tokens[tokens.slot], tokens.parity ^ 1);
      const int column = (at.unit(turn) * kUnitBoxes + box) * kBoxRow;
      Barrier& full = shared.full_tokens[tokens.slot];
      expect(full, S::token_bytes);
      copy_box(shared.tokens[tokens.slot], args.x, column, at.first_token, full, read_often_policy());
    }
  }
}

// Start to copy the words of a turn's groups, of a row by each lane of half a warp; no kernel of the step writes them.
template <class S>
__device__ inline void copy_words(const PrefillGemmArgs& args, const PrefillGemmPlace<S>& at, int turn,
                                  PrefillGemmShared<S>& shared) {
  const int in_tile = threadIdx.x / 32 * 16 + threadIdx.x % 16;
  const uint2* of_row = args.words + at.weight_row(args.n, in_tile) * args.units;
  if (threadIdx.x % 32 < 16 && turn < at.turns) start_copy<8>(&shared.words[turn % 2][in_tile], of_row + at.unit(turn));
}

// Multiply all units; the sums of 64 weight rows, as multiply_boxes() has them. Operands are made of a word while those
// of the word before are multiplied.
template <class S>
__device__ inline void multiply_units(const PrefillGemmArgs& args, const PrefillGemmPlace<S>& at,
                                      PrefillGemmShared<S>& shared, float (&sums)[S::sums]) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const unsigned mask = mask_of_codes(args.n);
  PipelineState<S::token_slots> tokens;
  int left = -1;  // the slot of tokens before
  copy_words<S>(args, at, 0, shared);
  for (int turn = 0; turn < at.turns; turn++) {
    const int slot = turn % S::weight_slots;
    wait_for_copies();
    __syncwarp();
    const uint2 upper_words = shared.words[turn % 2][row], lower_words = shared.words[turn % 2][row + 8];
    copy_words<S>(args, at, turn + 1, shared);
    wait(shared.full_weights[slot], turn / S::weight_slots % 2);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      unsigned upper[4], lower[4];
      load_half_units(reinterpret_cast<const Bf16*>(shared.weights[slot]), half, upper, lower);
      const RowScales of(half ? upper_words.y : upper_words.x, half ? lower_words.y : lower_words.x);
#pragma unroll
      for (int word = 0; word < 4; word++) {
        unsigned first[4], second[4];
        dequantize_rows(upper[word], lower[word], of, mask, first, second);
        keep(first), keep(second);
        if (word % 2 == 0) wait(shared.full_tokens[tokens.slot], tokens.parity);
        // Addresses count 16 bytes.
        const unsigned long long of_box = describe_box(shared.tokens[tokens.slot]) + word % 2 * 4;
        fence_wgmma();
        multiply_rows(sums, first, of_box);
        multiply_rows(sums, second, of_box + 2);
        commit_wgmma();
        wait_for_wgmma<1>();
        if (word % 2 == 0) {
          if (left >= 0 && threadIdx.x % 32 == 0) arrive(shared.empty_tokens[left]);
        } else {
          left = tokens.slot;
          tokens.advance();
        }
        if (half == 1 && word == 3 && threadIdx.x % 32 == 0) arrive(shared.empty_weights[slot]);
      }
    }
  }
  wait_for_wgmma<0>();
}

// Exchange the sums with the block that shares k; own: those of the tokens that this block writes.
template <class S>
__device__ inline void exchange_sums(const PrefillGemmPlace<S>& at, const float (&sums)[S::sums],
                                     PrefillGemmShared<S>& shared, float (&own)[S::own_sums]) {
  auto& others = shared.outputs().others;
#pragma unroll
  for (int to = 0; to < S::cluster; to++) {
    const float* part = sums + to * S::own_sums;
    if (to == at.rank) {
#pragma unroll
      for (int i = 0; i < S::own_sums; i++) own[i] = part[i];
    } else {
      const unsigned address = address_in(to, &others[0][threadIdx.x]);
#pragma unroll
      for (int i = 0; i < S::own_sums / 4; i++)
        store_in_cluster(address + i * sizeof(others[0]),
                         float4{part[i * 4], part[i * 4 + 1], part[i * 4 + 2], part[i * 4 + 3]});
    }
  }
  cluster_arrive();
  cluster_wait();
#pragma unroll
  for (int i = 0; i < S::own_sums / 4; i++) {
    const float4 values = others[i][threadIdx.x];
    own[i * 4] += values.x, own[i * 4 + 1] += values.y, own[i * 4 + 2] += values.z, own[i * 4 + 3] += values.w;
  }
}

// Turn a warp's sums of 16 weight rows, or of eight pairs of gate and up, and store the outputs.
template <class S>
__device__ inline void turn_sums(const float (&sums)[S::own_sums], PrefillGemmOutputs<S>& to) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, matrix = lane / 8 % 2;
  if constexpr (S::gated) {
    const auto gate = [&](int i) { return to_bf16_pair(silu(sums[i]) * sums[i + 2], silu(sums[i + 1]) * sums[i + 3]); };
#pragma unroll
    for (int i = 0; i < S::own_sums / 8; i++)
      store_transposed(&to.rows[i * 16 + matrix * 8 + lane % 8][warp * 8], gate(i * 8), gate(i * 8 + 4));
  } else {
#pragma unroll
    for (int i = 0; i < S::own_sums / 4; i++)
      store_transposed(&to.rows[i * 8 + lane % 8][warp * 16 + matrix * 8], to_bf16_pair(sums[i * 4], sums[i * 4 + 1]),
                       to_bf16_pair(sums[i * 4 + 2], sums[i * 4 + 3]));
  }
}

// Write outputs of so many tokens, through shared memory.
template <class S>
__device__ inline void write_sums(const PrefillGemmArgs& args, const PrefillGemmPlace<S>& at,
                                  const float (&sums)[S::own_sums], PrefillGemmShared<S>& shared) {
  constexpr int tokens = S::tokens / S::cluster, chunk = 8, chunks = S::outputs / chunk;
  turn_sums<S>(sums, shared.outputs());
  sync_multiplying();
  const int first = threadIdx.x % chunks * chunk, output = at.tile * S::outputs + first;
  for (int token = threadIdx.x / chunks; token < tokens; token += kMultiplyingWarps * 32 / chunks) {
    const int to = at.first_token + at.rank * tokens + token;
    if (to < args.rows && output < args.n)
      *reinterpret_cast<Vec16*>(args.out + long(to) * args.n + output) =
          *reinterpret_cast<const Vec16*>(&shared.outputs().rows[token][first]);
  }
}

template <class S>
__device__ inline void multiply_tile(const PrefillGemmArgs& args, const PrefillGemmPlace<S>& at,
                                     PrefillGemmShared<S>& shared) {
  float sums[S::sums] = {};
  multiply_units<S>(args, at, shared, sums);
  if constexpr (S::cluster > 1) {
    cluster_arrive(), cluster_wait();  // the pipelines have been read
    float own[S::own_sums];
    exchange_sums<S>(at, sums, shared, own);
    write_sums<S>(args, at, own, shared);
  } else {
    sync_multiplying();
    write_sums<S>(args, at, sums, shared);
  }
}

template <int kTokens, int kBlocks, bool kGated>
__global__ void __launch_bounds__(kMultiplyingWarps * 32 + 128, 1)
    multiply_prompts(const __grid_constant__ PrefillGemmArgs args) {
  using S = PrefillGemmShape<kTokens, kBlocks, kGated>;
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<PrefillGemmShared<S>*>(memory);
  const PrefillGemmPlace<S> at(args);
  const bool copies = threadIdx.x == kMultiplyingWarps * 32;
  if (copies) {
    for (int i = 0; i < S::weight_slots; i++)
      initialize(shared.full_weights[i], 1), initialize(shared.empty_weights[i], kMultiplyingWarps);
    for (int i = 0; i < S::token_slots; i++)
      initialize(shared.full_tokens[i], 1), initialize(shared.empty_tokens[i], kMultiplyingWarps);
    publish_barriers();
    prefetch_map(args.x);
    for (int turn = 0; turn < S::weight_slots && turn < at.turns; turn++) copy_unit<S>(args, at, turn, shared);
  }
  launch_dependents();
  __syncthreads();
  wait_for_prerequisites();
  if (threadIdx.x >= kMultiplyingWarps * 32) {
    give_registers<24>();
    if (copies) copy_operands<S>(args, at, shared);
  } else {
    take_registers<240>();
    multiply_tile<S>(args, at, shared);
  }
}

}  // namespace blink
