// SPDX-License-Identifier: Apache-2.0
// gemm.cuh's products with weights of 4 bits: these come as bytes through the same ring, become f16 in registers and go
// to the warpgroups' products from there. What is said of groups holds for gemm_fp8.cuh as well.
#pragma once

#include "gemm.cuh"
#include "quantized.cuh"
#include "wgmma_registers.cuh"

namespace blink {

// As GemmShape; the weight's map is one of bytes.
template <int kTokens_, int kGroups_, int kCluster_, int kBoxes_, int kStages_, Output kOutput_, bool kNorm_>
struct QuantizedGemmShape : OutputShape<kTokens_, kGroups_, kCluster_, kOutput_, kNorm_> {
  using Outputs = OutputShape<kTokens_, kGroups_, kCluster_, kOutput_, kNorm_>;
  static constexpr Format format = Format::kInt4;
  static constexpr bool grouped = true;
  static constexpr int unit = kUnit<format>, stage_k = kBoxes_ * unit, stages = kStages_;
  static constexpr int weight_boxes = kBoxes_, weight_columns = kUnitBytes;
  static constexpr int together = 1, other_warps = 2 + together;  // warps that convert a stage's activations
  static constexpr int factors = 1;                               // of a stage; gemm_fp8.cuh
  static constexpr int weight_tile = Outputs::tile * kBoxRow, token_tile = Outputs::tokens * kBoxRow;
  static constexpr int stage = weight_tile * weight_boxes + token_tile * (stage_k / kBoxRow);  // in two bytes
  static constexpr int ring_bytes = stages * stage * 2;
  static constexpr bool reuse = sizeof(Parts<Outputs>) > 8192;
  static constexpr int stage_groups = stage_k / kGroup, unit_steps = unit / 16;
  static constexpr int pitch = Outputs::tile + 1;  // of groups in shared memory
  static_assert(kGroups_ <= 2 && (!reuse || ring_bytes >= int(sizeof(Parts<Outputs>))));
};

template <class S>
struct QuantizedGemmShared : GemmShared<S> {
  Barrier ready[S::stages];  // whose activations are converted
  alignas(16) float factors[S::stages][S::factors];

  __device__ unsigned* groups() { return reinterpret_cast<unsigned*>(this + 1); }  // [groups of the block, S::pitch]
};

template <class S>
__device__ inline void initialize_others(QuantizedGemmShared<S>& shared) {
  for (int i = 0; i < S::stages; i++) initialize(shared.ready[i], S::together);
}

// Load the words of the tile's groups, which no kernel of the step writes.
template <class S>
__device__ inline void load_groups(const GemmArgs& args, const GemmPlace& at, unsigned* groups) {
  if constexpr (S::grouped) {
    const int count = at.turns * S::stage_groups, first = at.first_stage * S::stage_groups;
    for (int i = threadIdx.x; i < S::tile * count; i += S::threads + 32 * S::other_warps) {
      const int in_tile = i / count, group = i % count, half = in_tile / S::outputs;
      const int row = min(at.tile * S::outputs + in_tile % S::outputs, args.output.n - 1) + half * args.output.n;
      const bool exists = first + group < args.num_groups;
      groups[group * S::pitch + in_tile] = exists ? args.groups[long(row) * args.num_groups + first + group] : 0;
    }
  }
}

template <class S>
__device__ inline void prepare(const GemmArgs& args, const GemmPlace& at, QuantizedGemmShared<S>& shared) {
  load_groups<S>(args, at, shared.groups());
}

// Multiply 16 bytes of each of two rows of a lane, 8 apart; words: of their groups. `tokens` describes the first box of
// the stage's activations.
template <class S>
__device__ inline void multiply_chunks(Vec16 upper, Vec16 lower, const unsigned (&words)[2], unsigned long long tokens,
                                       int first_step, float (&sums)[S::tokens / 2]) {
  constexpr int count = kWordSteps<S::format>;
  const unsigned rows[2][4] = {{upper.x, upper.y, upper.z, upper.w}, {lower.x, lower.y, lower.z, lower.w}};
  unsigned a[4 * count][4];
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int row = 0; row < 2; row++) {
      unsigned pairs[count][2];
      unpack_half<S::format>(rows[row][i], words[row], pairs);
#pragma unroll
      for (int j = 0; j < count; j++) a[i * count + j][row] = pairs[j][0], a[i * count + j][row + 2] = pairs[j][1];
    }
#pragma unroll
  for (int i = 0; i < 4 * count; i++) keep(a[i]);
  fence_products();
#pragma unroll
  for (int i = 0; i < 4 * count; i++) {
    const int step = first_step + i;  // boxes' addresses count 16 bytes
    multiply_registers(sums, a[i], tokens + step / 4 * (S::token_tile / 8) + step % 4 * 2);
  }
  commit_products();
}

// Multiply a box of weights, half of which is a group.
template <class S>
__device__ inline void multiply_box(const char* weights, const unsigned* groups, unsigned long long tokens, int first,
                                    float (&sums)[S::tokens / 2]) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int place = row * kUnitBytes + ((lane % 4 * 2 + half) ^ lane / 4) * 16;  // swizzled: tensor_copy.cuh
    const Vec16 upper = *reinterpret_cast<const Vec16*>(weights + place);
    const Vec16 lower = *reinterpret_cast<const Vec16*>(weights + place + 8 * kUnitBytes);
    const unsigned* group = groups + half * S::pitch + row;
    const unsigned words[2] = {group[0], group[8]};
    float parts[S::tokens / 2] = {};
    multiply_chunks<S>(upper, lower, words, tokens, first + half * S::unit_steps / 2, parts);
    wait_for_products<0>();
    const float scales[2] = {group_scale<S::format>(words[0]) * kActivationDivisor,
                             group_scale<S::format>(words[1]) * kActivationDivisor};
#pragma unroll
    for (int i = 0; i < S::tokens / 2; i++) sums[i] += parts[i] * scales[i / 2 % 2];
  }
}

// What a warp does: make f16 of each stage's activations, over kActivationDivisor, in their place.
template <class S>
__device__ inline void convert_stages(const GemmArgs&, const GemmPlace& at, QuantizedGemmShared<S>& shared) {
  constexpr int chunks = S::token_tile * (S::stage_k / kBoxRow) / 8;
  constexpr unsigned scale = (127 - 6) << 7 | (127 - 6) << 23;  // 2^-6 as bf16, twice
  static_assert(kActivationDivisor == 64);
  for (int turn = 0; turn < at.turns; turn++) {
    const int slot = turn % S::stages;
    wait(shared.full[slot], turn / S::stages % 2);
    auto* tokens = reinterpret_cast<Vec16*>(shared.ring[slot] + S::weight_tile * S::weight_boxes);
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < chunks; i += 32) {
      Vec16 v = multiply(tokens[i], Vec16{scale, scale, scale, scale});
      tokens[i] = {to_half_pair(low_float(v.x), high_float(v.x)), to_half_pair(low_float(v.y), high_float(v.y)),
                   to_half_pair(low_float(v.z), high_float(v.z)), to_half_pair(low_float(v.w), high_float(v.w))};
    }
    fence_shared_writes();
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(shared.ready[slot]);
  }
}

template <class S>
__device__ inline void multiply_stages(const GemmArgs&, const GemmPlace& at, QuantizedGemmShared<S>& shared,
                                       float (&sums)[S::tokens / 2]) {
  for (int turn = 0; turn < at.turns; turn++) {
    const int slot = turn % S::stages;
    wait(shared.full[slot], turn / S::stages % 2);
    wait(shared.ready[slot], turn / S::stages % 2);
    const Bf16* weights = shared.ring[slot];
    const unsigned long long tokens = describe_box(weights + S::weight_tile * S::weight_boxes);
    const unsigned* groups = shared.groups() + (at.stage(turn) - at.first_stage) * S::stage_groups * S::pitch;
#pragma unroll
    for (int box = 0; box < S::weight_boxes; box++)
      multiply_box<S>(reinterpret_cast<const char*>(weights + box * S::weight_tile),
                      groups + box * (S::unit / kGroup) * S::pitch, tokens, box * S::unit_steps, sums);
    if (threadIdx.x % 32 == 0 && turn + S::stages < at.turns) arrive(shared.empty[slot]);
  }
}

// Blocks of a multiprocessor for which registers are kept: products that are under way need some.
__device__ constexpr int blocks_for(int tokens, int groups) { return (tokens < 32 ? 4 : 3) - groups; }

template <int kTokens, int kGroups, int kCluster, int kBoxes, int kStages, Output kOutput, bool kNorm>
__global__ void __launch_bounds__(128 * kGroups + 96, blocks_for(kTokens, kGroups))
    gemm_quantized(const __grid_constant__ GemmArgs args) {
  using S = QuantizedGemmShape<kTokens, kGroups, kCluster, kBoxes, kStages, kOutput, kNorm>;
  // What kernels/gpu/decode/gemm_quantized.py counts.
  static_assert(sizeof(QuantizedGemmShared<S>) == sizeof(GemmShared<S>) + 1024);
  extern __shared__ __align__(1024) char memory[];
  compute_gemm<S>(args, *reinterpret_cast<QuantizedGemmShared<S>*>(memory));
}

}  // namespace blink
