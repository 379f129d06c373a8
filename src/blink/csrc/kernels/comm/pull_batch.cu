// SPDX-License-Identifier: Apache-2.0
// Copies a step's batch from the memory of the scheduler's GPU to another one, whose graphs begin with it. What the
// model reads of its slots is copied too: tables, and a parameter.
#include "kernels/comm_args.h"
#include "kernels/common/ptx.cuh"

namespace blink {

constexpr int kSpanBlocks = 8;

__device__ inline void copy_words(uint32_t* to, const uint32_t* from, int count, int first, int step) {
  for (int i = first; i < count; i += step) to[i] = load_relaxed(from[i]);
}

// Copy a parameter of a slot.
__device__ inline void pull_param(const PullArgs& args, int slot) {
  const long place = long(slot) * args.param_words + args.param;
  args.own_params[place] = load_relaxed(args.params[place]);
}

// Copy the blocks of a row's sequence.
__device__ inline void pull_row(const PullArgs& args, int row) {
  const auto read = [&](const int32_t* at) { return int(load_relaxed(*reinterpret_cast<const uint32_t*>(at + row))); };
  const int count = (read(args.context_lens) + args.block_size - 1) / args.block_size;
  const int slot = read(args.row_slots);
  const long place = long(slot) * args.max_blocks;
  const auto pull = [&](int32_t* own, const int32_t* tables) {
    copy_words(reinterpret_cast<uint32_t*>(own + place), reinterpret_cast<const uint32_t*>(tables + place), count,
               threadIdx.x, blockDim.x);
  };
  pull(args.own_tables, args.tables);
  if (args.window_tables != nullptr) pull(args.own_window_tables, args.window_tables);
  if (args.params != nullptr && threadIdx.x == 0) pull_param(args, slot);
}

// Grid: kSpanBlocks, then a block for each row.
template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1) pull_batch(const PullArgs args) {
  if (blockIdx.x >= kSpanBlocks) {
    pull_row(args, blockIdx.x - kSpanBlocks);
    return;
  }
  auto* to = reinterpret_cast<uint32_t*>(args.to);
  const auto* from = reinterpret_cast<const uint32_t*>(args.source);
  for (int span = 0; span < args.num_spans; span++) {
    const int begin = args.spans[2 * span], count = args.spans[2 * span + 1];
    copy_words(to + begin, from + begin, count, blockIdx.x * kThreads + threadIdx.x, kSpanBlocks * kThreads);
  }
}

}  // namespace blink
