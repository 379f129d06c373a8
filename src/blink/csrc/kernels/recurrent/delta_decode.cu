// SPDX-License-Identifier: Apache-2.0
// A decoding step of a gated delta-net between its projections: convolution, gates, delta rule, norm and output gate.
// A block has the state of one value head of one row: it is read once, kept in registers and written once.
#include "kernels/args.h"
#include "kernels/common/ptx.cuh"

namespace blink {

constexpr int kConvWidth = 4;

// Sizes. A thread has four neighbouring columns (of v_dim) of kSteps rows (of k_dim) of the state.
template <int kKHeads, int kVHeads, int kKDim, int kVDim, int kThreads>
struct DeltaShape {
  static constexpr int k_heads = kKHeads, v_heads = kVHeads, k_dim = kKDim, v_dim = kVDim;
  static constexpr int threads = kThreads, warps = kThreads / 32;
  static constexpr int repeats = kVHeads / kKHeads;
  static constexpr int keys = kKHeads * kKDim, channels = 2 * keys + kVHeads * kVDim;
  static constexpr int mixed = 2 * kKDim + kVDim;  // convolved values of a head: of q, k and v
  static constexpr int mixed_per_thread = (mixed + kThreads - 1) / kThreads;
  static constexpr int lanes = kVDim / 4;          // that have a row together
  static constexpr int stride = kThreads / lanes;  // rows that the block's threads have at once
  static constexpr int steps = kKDim / stride;
  static_assert(kVHeads % kKHeads == 0 && kVDim % 4 == 0 && lanes <= 32 && 32 % lanes == 0);
  static_assert(steps * stride == kKDim && kKDim % 32 == 0);
};

template <class S>
struct DeltaShared {
  alignas(16) float mixed[S::mixed];
  alignas(16) float of_k[S::warps][S::v_dim], of_q[S::warps][S::v_dim];  // what the old state says to them
};

// What a block works on.
struct Item {
  int row, head, slot, position;
};

// The channel of a head's convolved value i.
template <class S>
__device__ inline int channel_of(int i, int head) {
  const int k_head = head / S::repeats;
  if (i < S::k_dim) return k_head * S::k_dim + i;
  if (i < 2 * S::k_dim) return S::keys + k_head * S::k_dim + i - S::k_dim;
  return 2 * S::keys + head * S::v_dim + i - 2 * S::k_dim;
}

// What a thread loads beside the state.
template <class S>
struct Loaded {
  Bf16 newest[S::mixed_per_thread], past[S::mixed_per_thread][kConvWidth - 1], weights[S::mixed_per_thread][kConvWidth];
  Bf16 a, b;
  float rate, dt_bias;
  uint2 z;  // of four columns, in the first lanes
  float4 norm;
};

// Load what this step does not write. What lies before a sequence's start is loaded, too, and not used.
template <class S>
__device__ inline void load_kept(const DeltaDecodeArgs& args, Item item, Loaded<S>& to) {
  const Bf16* inputs = args.inputs + long(item.slot) * kConvWidth * S::channels;
#pragma unroll
  for (int n = 0; n < S::mixed_per_thread; n++) {
    const int channel = channel_of<S>(min(threadIdx.x + n * S::threads, S::mixed - 1), item.head);
#pragma unroll
    for (int back = 1; back < kConvWidth; back++)
      to.past[n][back - 1] = inputs[(item.position + kConvWidth - back) % kConvWidth * S::channels + channel];
#pragma unroll
    for (int back = 0; back < kConvWidth; back++)
      to.weights[n][back] = args.conv[(kConvWidth - 1 - back) * S::channels + channel];
  }
  to.rate = args.rate[item.head], to.dt_bias = args.dt_bias[item.head];
  if (threadIdx.x < S::lanes) to.norm = *reinterpret_cast<const float4*>(args.norm + threadIdx.x * 4);
}

// Load what kernels in front have written.
template <class S>
__device__ inline void load_fresh(const DeltaDecodeArgs& args, Item item, Loaded<S>& to) {
#pragma unroll
  for (int n = 0; n < S::mixed_per_thread; n++) {
    const int channel = channel_of<S>(min(threadIdx.x + n * S::threads, S::mixed - 1), item.head);
    to.newest[n] = args.qkv[long(item.row) * args.qkv_stride + channel];
  }
  to.a = args.a[long(item.row) * args.a_stride + item.head];
  to.b = args.b[long(item.row) * args.b_stride + item.head];
  const Bf16* z = args.z + long(item.row) * args.z_stride + item.head * S::v_dim;
  if (threadIdx.x < S::lanes) to.z = *reinterpret_cast<const uint2*>(z + threadIdx.x * 4);
}

// Convolve, and keep the new input: of q and k, one of the heads that share them does.
template <class S>
__device__ inline void convolve(const DeltaDecodeArgs& args, Item item, const Loaded<S>& in, DeltaShared<S>& shared) {
  Bf16* inputs = args.inputs + (long(item.slot) * kConvWidth + item.position % kConvWidth) * S::channels;
#pragma unroll
  for (int n = 0; n < S::mixed_per_thread; n++) {
    const int i = threadIdx.x + n * S::threads;
    float sum = to_float(in.newest[n]) * to_float(in.weights[n][0]);
#pragma unroll
    for (int back = 1; back < kConvWidth; back++)
      if (back <= item.position) sum += to_float(in.past[n][back - 1]) * to_float(in.weights[n][back]);
    if (i >= S::mixed) break;
    shared.mixed[i] = silu(sum);
    if (i >= 2 * S::k_dim || item.head % S::repeats == 0) inputs[channel_of<S>(i, item.head)] = in.newest[n];
  }
}

__device__ inline float sum_of_warp(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

struct Scales {
  float q, k, qk;  // what normalises q and k, and their product then
};

// Each warp computes them for itself.
template <class S>
__device__ inline Scales normalize(const DeltaShared<S>& shared) {
  float qq = 0, kk = 0, qk = 0;
#pragma unroll
  for (int i = threadIdx.x % 32; i < S::k_dim; i += 32) {
    const float q = shared.mixed[i], k = shared.mixed[S::k_dim + i];
    qq += q * q, kk += k * k, qk += q * k;
  }
  const float scale = rsqrtf(float(S::k_dim));
  const float q = rsqrtf(sum_of_warp(qq) + 1e-6f) * scale, k = rsqrtf(sum_of_warp(kk) + 1e-6f);
  return {q, k, sum_of_warp(qk) * q * k};
}

struct Gates {
  float decay, beta;
};

template <class S>
__device__ inline Gates find_gates(const Loaded<S>& in) {
  const float a = to_float(in.a) + in.dt_bias, softplus = a > 20 ? a : log1pf(__expf(a));
  return {__expf(in.rate * softplus), 1 / (1 + __expf(-to_float(in.b)))};
}

// The output's gates at four columns, times the norm's weights.
template <class S>
__device__ inline float4 find_output_gates(const Loaded<S>& in) {
  return {silu(low_float(in.z.x)) * in.norm.x, silu(high_float(in.z.x)) * in.norm.y,
          silu(low_float(in.z.y)) * in.norm.z, silu(high_float(in.z.y)) * in.norm.w};
}

__device__ inline float4 scale_add(float4 a, float scale, float4 b) {
  return {a.x * scale + b.x, a.y * scale + b.y, a.z * scale + b.z, a.w * scale + b.w};
}

// Sum over the lanes of a warp that have the same columns.
template <class S>
__device__ inline float4 sum_of_columns(float4 v) {
#pragma unroll
  for (int step = S::lanes; step < 32; step *= 2) {
    v.x += __shfl_xor_sync(~0u, v.x, step), v.y += __shfl_xor_sync(~0u, v.y, step);
    v.z += __shfl_xor_sync(~0u, v.z, step), v.w += __shfl_xor_sync(~0u, v.w, step);
  }
  return v;
}

// A thread's part of the state.
template <class S>
struct Held {
  float4 values[S::steps];
};

template <class S>
__device__ inline Held<S> load_state(const float* from, bool is_first) {
  Held<S> held;
#pragma unroll
  for (int step = 0; step < S::steps; step++) {
    const auto* values = reinterpret_cast<const float4*>(from + step * S::stride * S::v_dim);
    held.values[step] = is_first ? float4{} : __ldcs(values);
  }
  return held;
}

// Multiply the old state with k and q: each warp's part to shared memory.
template <class S>
__device__ inline void read_state(const Held<S>& held, int first_row, int column, DeltaShared<S>& shared) {
  float4 of_k = {}, of_q = {};
#pragma unroll
  for (int step = 0; step < S::steps; step++) {
    const int k = first_row + step * S::stride;
    of_k = scale_add(held.values[step], shared.mixed[S::k_dim + k], of_k);
    of_q = scale_add(held.values[step], shared.mixed[k], of_q);
  }
  of_k = sum_of_columns<S>(of_k), of_q = sum_of_columns<S>(of_q);
  if (threadIdx.x % 32 < S::lanes) {
    *reinterpret_cast<float4*>(&shared.of_k[threadIdx.x / 32][column]) = of_k;
    *reinterpret_cast<float4*>(&shared.of_q[threadIdx.x / 32][column]) = of_q;
  }
}

template <class S>
__device__ inline float4 sum_of_warps(const float (&parts)[S::warps][S::v_dim], int column) {
  float4 sum = {};
#pragma unroll
  for (int warp = 0; warp < S::warps; warp++)
    sum = scale_add(*reinterpret_cast<const float4*>(&parts[warp][column]), 1, sum);
  return sum;
}

// Normalise the head's output and gate it.
template <class S>
__device__ inline void write_output(const DeltaDecodeArgs& args, Item item, float4 out, float4 gates) {
  float square_sum = out.x * out.x + out.y * out.y + out.z * out.z + out.w * out.w;
#pragma unroll
  for (int step = 1; step < S::lanes; step *= 2) square_sum += __shfl_xor_sync(~0u, square_sum, step);
  if (threadIdx.x >= S::lanes) return;
  const float rate = rsqrtf(square_sum / S::v_dim + args.eps);
  uint2 pairs;
  pairs.x = to_bf16_pair(out.x * rate * gates.x, out.y * rate * gates.y);
  pairs.y = to_bf16_pair(out.z * rate * gates.z, out.w * rate * gates.w);
  const long at = (long(item.row) * S::v_heads + item.head) * S::v_dim + threadIdx.x * 4;
  *reinterpret_cast<uint2*>(args.out + at) = pairs;
}

// Grid: v_heads x rows.
template <int kKHeads, int kVHeads, int kKDim, int kVDim, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks) delta_decode(const DeltaDecodeArgs args) {
  using S = DeltaShape<kKHeads, kVHeads, kKDim, kVDim, kThreads>;
  __shared__ DeltaShared<S> shared;
  const int row = blockIdx.y, slot = args.slots[row], position = args.positions[row];
  const Item item = {row, int(blockIdx.x), max(slot, 0), position};
  const int column = threadIdx.x % S::lanes * 4, first_row = threadIdx.x / S::lanes;
  launch_dependents();
  // No kernel of this step has written the slots, the positions, the states or the inputs, but for some at its start
  // (copies from snapshots), for whose end a launch without PDL has waited.
  float* state = args.states + ((long(item.slot) * S::v_heads + item.head) * S::k_dim + first_row) * S::v_dim + column;
  const Held<S> held = load_state<S>(state, slot < 0 || position == 0);
  Loaded<S> in;
  load_kept<S>(args, item, in);
  wait_for_prerequisites();
  if (slot < 0) return;
  load_fresh<S>(args, item, in);
  convolve<S>(args, item, in, shared);
  const Gates gates = find_gates<S>(in);
  __syncthreads();
  const Scales scales = normalize<S>(shared);
  read_state<S>(held, first_row, column, shared);
  __syncthreads();
  const float4 of_k = sum_of_warps<S>(shared.of_k, column);
  const float4 v = *reinterpret_cast<const float4*>(&shared.mixed[2 * S::k_dim + column]);
  const float4 update = scale_add(of_k, -gates.beta * gates.decay * scales.k, scale_add(v, gates.beta, {}));
#pragma unroll
  for (int step = 0; step < S::steps; step++) {
    const float k = shared.mixed[S::k_dim + first_row + step * S::stride] * scales.k;
    const float4 next = scale_add(update, k, scale_add(held.values[step], gates.decay, {}));
    __stcs(reinterpret_cast<float4*>(state + step * S::stride * S::v_dim), next);
  }
  if (threadIdx.x >= 32) return;
  const float4 old = sum_of_warps<S>(shared.of_q, column);
  const float4 out = scale_add(old, gates.decay * scales.q, scale_add(update, scales.qk, {}));
  write_output<S>(args, item, out, find_output_gates<S>(in));
}

}  // namespace blink
