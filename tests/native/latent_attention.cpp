// SPDX-License-Identifier: Apache-2.0
// csrc/kernels/attention/latent.cu on the host's threads behind a C API, one block after the other.
#include "attention_tensors.h"
#include "kernels/attention/latent.cu"

using namespace blink;

template <int kGroup, int kGroups, int kBlockSize>
static void run(const Tensors& tensors, int table_stride, int items, float scale) {
  constexpr long token = kLatentParts * 64;
  PromptArgs args = make_arguments(tensors, table_stride, scale);
  args.cells = Boxes{tensors.cache, {token, 64, 8 * token, 0}, {8, kLatentParts, kBlockSize / 8, 1}};
  for (int i = 0; i < items * kGroups; i++) {
    phases.clear();
    multiplying[0] = std::make_unique<std::barrier<>>(kTileThreads);
    run_cluster(1, kTileThreads + 128, sizeof(LatentShared), [&] {
      blockIdx = {unsigned(i % kGroups), unsigned(i / kGroups)};
      attend_latents<kGroup, kGroups, kBlockSize>(args);
    });
  }
}

extern "C" void attend(const Tensors* tensors, int group, int block_size, int table_stride, int items, float scale) {
  if (group == 20 && block_size == 16) return run<20, 1, 16>(*tensors, table_stride, items, scale);
  if (group == 64 && block_size == 8) return run<64, 2, 8>(*tensors, table_stride, items, scale);
  if (group == 3 && block_size == 64) return run<3, 1, 64>(*tensors, table_stride, items, scale);
  std::abort();
}
