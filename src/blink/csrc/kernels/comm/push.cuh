// SPDX-License-Identifier: Apache-2.0
// How a kernel sends what it computes: lines go to all ranks, its own too, from the registers that hold the results.
// The next kernel, an all-reduce (all_reduce_spread.cu), polls them, and need not wait for the kernel to end.
//
// Lines of exchange e + 2 go where those of e were, so all ranks must have read these. A kernel pushes once it has
// waited for those in front of it. So its rank has ended the all-reduce of e + 1, for which every other rank's kernel
// pushed once that rank had ended the all-reduce of e.
#pragma once

#include "kernels/comm/exchange.cuh"

namespace blink {

constexpr int kLineLanes = 4;  // neighbours with a 16-bit number each, which make a line

// Where a thread sends: of each four neighbours one has every fourth rank. Loaded long before it is used.
struct PushBoxes {
  static constexpr int kCount = kMostRanks / kLineLanes;
  unsigned epoch = 0;
  uint64_t boxes[kCount] = {};

  // After wait_for_prerequisites(). own_box: that of this rank.
  __device__ void load(const RankArgs& ranks, const void* own_box) {
    epoch = static_cast<const volatile RankWords*>(own_box)->epoch;
#pragma unroll
    for (int i = 0; i < kCount; i++)
      if (rank(i) < ranks.size) boxes[i] = ranks.boxes[rank(i)];
  }

  static __device__ int rank(int i) { return int(threadIdx.x) % kLineLanes + i * kLineLanes; }
};

// Send a line that four neighbouring lanes have, in bits of a number each. All lanes of the warp; is_there: whether
// these four have one.
__device__ inline void push_line(const RankArgs& ranks, const PushBoxes& to, int line, unsigned bits, bool is_there) {
  const unsigned pair = bits | __shfl_xor_sync(~0u, bits, 1) << 16;  // of the even lane
  const unsigned lane = threadIdx.x % 32, first = lane - lane % kLineLanes;
  const uint2 data = make_uint2(__shfl_sync(~0u, pair, first), __shfl_sync(~0u, pair, first + 2));
  const unsigned number = to.epoch + ranks.op + 1;
  const long place = (long(number % 2) * ranks.size + ranks.rank) * ranks.lines + line;
#pragma unroll
  for (int i = 0; i < PushBoxes::kCount; i++)
    if (is_there && PushBoxes::rank(i) < ranks.size)
      store_line(reinterpret_cast<uint4*>(to.boxes[i] + kBoxLines) + place, data, number);
}

}  // namespace blink
