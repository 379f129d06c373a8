// SPDX-License-Identifier: Apache-2.0
// The inverses of unit lower triangular matrices of 64 x 64, in float32, by forward substitution: a thread has a
// column.
#include "kernels/args.h"
#include "kernels/common/ptx.cuh"

namespace blink {

constexpr int kSize = 64, kMatrices = 2;  // of a block

// kThreads: kSize for each matrix of a block.
template <int kThreads>
__global__ void __launch_bounds__(kThreads, 4) invert(const InvertArgs args) {
  static_assert(kThreads == kMatrices * kSize);
  __shared__ alignas(16) float shared[kMatrices][kSize][kSize];
  const int mine = threadIdx.x / kSize, column = threadIdx.x % kSize;
  const long matrix = min(int(blockIdx.x) * kMatrices + mine, args.matrices - 1);
  launch_dependents();
  wait_for_prerequisites();
  const auto* from = reinterpret_cast<const float4*>(args.below + matrix * kSize * kSize);
#pragma unroll
  for (int i = 0; i < kSize / 4; i++)
    reinterpret_cast<float4*>(shared[mine])[i * kSize + column] = __ldcs(from + i * kSize + column);
  const float factor = args.factor[matrix * kSize + column];
  __syncthreads();
  float x[kSize];
  Bf16* out = args.out + matrix * kSize * kSize + column;
#pragma unroll
  for (int row = 0; row < kSize; row++) {
    float sums[4] = {row == column ? 1.0f : 0.0f};
#pragma unroll
    for (int i = 0; i < row; i += 4) {
      const float4 a = *reinterpret_cast<const float4*>(&shared[mine][row][i]);
      sums[0] -= a.x * x[i];
      if (i + 1 < row) sums[1] -= a.y * x[i + 1];
      if (i + 2 < row) sums[2] -= a.z * x[i + 2];
      if (i + 3 < row) sums[3] -= a.w * x[i + 3];
    }
    x[row] = sums[0] + sums[1] + (sums[2] + sums[3]);
    out[row * kSize] = to_bf16(x[row] * factor);
  }
}

}  // namespace blink
