// SPDX-License-Identifier: Apache-2.0
// GEMVs whose results go to all ranks as they are computed (push.cuh). Each is that of kernels/gemm but for its
// epilogue: a shape of its own chooses the functions here where those there have the same names.
#include "kernels/comm/push.cuh"
#include "kernels/gemm/gemv_int4.cuh"
#include "kernels/gemm/gemv_quantized.cuh"

namespace blink {

template <class Base>
struct PushShape : Base {
  static_assert(Base::output == Output::kStore && !Base::norm && Base::share % kLineLanes == 0);
};

// A GEMV's arguments, where its epilogue finds those of the exchange.
struct PushedGemv : GemvArgs {
  __device__ explicit PushedGemv(const PushGemvArgs& args) : GemvArgs(args.gemv), push(args) {}
  const PushGemvArgs& push;
};

template <class Base>
struct Outputs<PushShape<Base>> {
  static constexpr int kCount = Base::outputs_per_thread;
  bool is_there[kCount];
  int line[kCount];
  float addend[kCount], scale[Base::scaled ? kCount : 1];
  PushBoxes to;
};

template <class S>
__device__ inline Outputs<S> load_addends(const PushedGemv& args, int tile, int rank) {
  Outputs<S> to = {};
  to.to.load(args.push.ranks, args.push.own_box);
#pragma unroll
  for (int i = 0; i < S::outputs_per_thread; i++) {
    const int at = i * 32 * S::warps + threadIdx.x, row = at / S::share;
    const int output = tile * S::outputs + rank * S::share + at % S::share;
    to.is_there[i] = row < S::rows;
    to.line[i] = (row * args.n + output) / kLineLanes;
    if (!to.is_there[i]) continue;
    if constexpr (S::scaled) to.scale[i] = args.scales[output];
    if (args.bias) to.addend[i] = to_float(args.bias[output]);
  }
  return to;
}

template <class S>
__device__ inline void write_outputs(const PushedGemv& args, const GemvShared<S>& shared, const Outputs<S>& to) {
#pragma unroll
  for (int i = 0; i < S::outputs_per_thread; i++) {
    const int at = i * 32 * S::warps + threadIdx.x, row = at / S::share, output = at % S::share;
    float value = 0;
    if (to.is_there[i]) {
#pragma unroll
      for (int block = 0; block < S::cluster; block++) value += shared.from_blocks[block][row][output];
      if constexpr (S::scaled) value *= to.scale[i];
      value += to.addend[i];
    }
    push_line(args.push.ranks, to.to, to.line[i], to_bf16(value).bits, to.is_there[i]);
  }
}

// As gemv; n is a multiple of a tile's outputs.
template <int kRows, int kK, int kWarps, int kCluster, int kSlices, int kTile, int kStageRows, int kStages,
          Output kOutput, bool kNorm>
__global__ void __launch_bounds__(32 * (kWarps + 1), kWarps <= 4 ? 3 : 2) push_gemv(const PushGemvArgs args) {
  using S = PushShape<GemvShape<kRows, kK, kWarps, kCluster, kSlices, kTile, kStageRows, kStages, kOutput, kNorm>>;
  extern __shared__ __align__(1024) char memory[];
  compute_gemv<S>(PushedGemv(args), *reinterpret_cast<GemvShared<S>*>(memory));
}

template <bool kGrouped, int kRows, int kK, int kWarps, int kCluster, int kSlices, int kTile, int kStageRows,
          int kStages, Output kOutput, bool kNorm>
__global__ void __launch_bounds__(32 * (kWarps + 1), kWarps <= 4 ? 3 : 2) push_gemv_quantized(const PushGemvArgs args) {
  using S = PushShape<QuantizedGemvShape<FormatId::kFp8, kGrouped, kRows, kK, kWarps, kCluster, kSlices, kTile,
                                         kStageRows, kStages, kOutput, kNorm>>;
  extern __shared__ __align__(1024) char memory[];
  compute_gemv<S>(PushedGemv(args), *reinterpret_cast<QuantizedGemvShared<S>*>(memory));
}

template <int kRows, int kK, int kWarps, int kCluster, int kSlices, int kTile, int kStageRows, int kStages,
          Output kOutput, bool kNorm>
__global__ void __launch_bounds__(32 * (kWarps + 1), kInt4Blocks<kWarps>) push_gemv_int4(const PushGemvArgs args) {
  using S = PushShape<Int4GemvShape<kRows, kK, kWarps, kCluster, kSlices, kTile, kStageRows, kStages, kOutput, kNorm>>;
  extern __shared__ __align__(1024) char memory[];
  compute_gemv<S>(PushedGemv(args), *reinterpret_cast<Int4GemvShared<S>*>(memory));
}

}  // namespace blink
