// SPDX-License-Identifier: Apache-2.0
// csrc/gpu/decode/draw.cu on the host's threads behind a C API, one row at a time.
#include "draw.cu"

#include "gpu_threads.h"

using namespace blink;

constexpr int kThreads = 64;

struct Found {
  float floor;  // NaN: nothing can be drawn
  float value;  // of what won, with noise
  int32_t token;
};

// Find the floor of a row of bf16, and draw from it: as the model made it, or from what was changed.
extern "C" void draw_row(const uint16_t* logits, uint32_t vocab_size, const float* scaled, uint32_t width,
                         const Sampling* sampling, int32_t step, Found* found) {
  BatchHeader header{};
  SlotParams params{};
  header.num_rows = 1;
  params.sampling = *sampling;
  const int32_t slot = 0, changed = scaled != nullptr;
  float best[3];
  int32_t tokens[3];
  const DrawArgs args{logits, scaled, &changed,   &header,    &slot, &step, &params,
                      best,   tokens, vocab_size, vocab_size, width, 3};
  const size_t part_bytes = (vocab_size / 4 + kRowCluster - 1) / kRowCluster * sizeof(Raw<Bf16>);
  run_cluster(kRowCluster, kThreads, sizeof(RowShared) + part_bytes, [&] { draw_rows<Bf16, kThreads>(args); });
  if (best[1] != -kInfinity || best[2] != -kInfinity) std::abort();
  found->value = best[0], found->token = tokens[0], found->floor = __uint_as_float(0x7fc00000u);
  if (!is_finite(best[0])) return;
  run_cluster(kRowCluster, kThreads, sizeof(RowShared) + part_bytes, [&] {
    auto& shared = *reinterpret_cast<RowShared*>(block->shared());
    RowPart<Bf16> part((changed ? width : vocab_size) / 4,
                       reinterpret_cast<Bf16*>(block->shared() + sizeof(RowShared)));
    if (changed)
      part.keep_outside(scaled);
    else
      part.stage<kThreads>(reinterpret_cast<const Bf16*>(logits));
    const float factor = changed ? 1 : 1 / sampling->temperature;
    const Extremes extremes = find_extremes<Bf16, kThreads>(shared, part);
    const float floor = find_floor<Bf16, kThreads>(shared, part, extremes, factor, *sampling);
    if (threadIdx.x == 0 && cluster_rank() == 1) found->floor = floor;
  });
}
