// SPDX-License-Identifier: Apache-2.0
// csrc/kernels/prefill/attention.cu on the host's threads behind a C API, one block after the other.
#include "attention_tensors.h"
#include "kernels/prefill/attention.cu"

using namespace blink;

template <int kGroup, int kKvHeads, int kBlockSize>
static void run(const Tensors& tensors, int num_blocks, int table_stride, int items, float scale) {
  constexpr long token = kKvHeads * kHeadDim;
  PromptArgs args = make_arguments(tensors, table_stride, scale);
  args.cells = Boxes{tensors.cache, {token, 64, 8 * token, num_blocks * kBlockSize * token}, {8, 2, kBlockSize / 8, 1}};
  for (int i = 0; i < items * kKvHeads; i++) {
    phases.clear();
    multiplying[0] = std::make_unique<std::barrier<>>(kTileThreads);
    for (auto& warpgroup : warpgroups) warpgroup = std::make_unique<std::barrier<>>(128);
    for (auto& turn : turns) turn = std::make_unique<std::barrier<>>(kTileThreads);
    run_cluster(1, kTileThreads + 128, sizeof(PromptShared), [&] {
      blockIdx = {unsigned(i % kKvHeads), unsigned(i / kKvHeads)};
      attend_prompts<kGroup, kKvHeads, kBlockSize>(args);
    });
  }
}

extern "C" void attend(const Tensors* tensors, int group, int num_blocks, int block_size, int table_stride, int items,
                       float scale) {
  if (group == 4 && block_size == 16) return run<4, 2, 16>(*tensors, num_blocks, table_stride, items, scale);
  if (group == 3 && block_size == 8) return run<3, 2, 8>(*tensors, num_blocks, table_stride, items, scale);
  if (group == 1 && block_size == 128) return run<1, 2, 128>(*tensors, num_blocks, table_stride, items, scale);
  std::abort();
}
