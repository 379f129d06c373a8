// SPDX-License-Identifier: Apache-2.0
// The first residual of a step, with what the first layer's norm needs.
#pragma once

#include "kernels/args.h"
#include "kernels/common/hi_lo.cuh"

namespace blink {

constexpr int kEmbedThreads = 256;

// Write what the next GEMM reads.
template <FormatId kWrites>
__device__ inline void write_normed(const EmbedArgs& args, int row, int column, Vec16 v) {
  if constexpr (kWrites != FormatId::kBf16) {
    const unsigned pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
      write_columns<kWrites>(args.next_x, long(gridDim.x) * args.hidden, long(row) * args.hidden, column + i * 2,
                             pairs[i]);
  } else {
    *reinterpret_cast<Vec16*>(args.next_x + long(row) * args.hidden + column) = v;
  }
}

// One block for each row.
template <FormatId kWrites>
__global__ void __launch_bounds__(kEmbedThreads) embed(const EmbedArgs args) {
  __shared__ float sums[kEmbedThreads / 32];
  launch_dependents();
  wait_for_prerequisites();
  const int row = blockIdx.x;
  const Bf16* from = args.embedding + long(*(volatile const int*)(args.ids + row)) * args.hidden;
  float sum = 0;
  for (int i = threadIdx.x * 8; i < args.hidden; i += kEmbedThreads * 8) {
    const Vec16 v = load(from + i);
    *reinterpret_cast<Vec16*>(args.residual + long(row) * args.hidden + i) = v;
    write_normed<kWrites>(args, row, i, multiply(v, load(args.norm + i)));
    sum += square_sum(v);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < kEmbedThreads / 32; warp++) sum += sums[warp];
  args.next_square_sums[row] = sum;
}

}  // namespace blink
