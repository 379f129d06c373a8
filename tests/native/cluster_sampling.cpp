// SPDX-License-Identifier: Apache-2.0
// csrc/gpu/decode/sample.cu on the host's threads behind a C API, one row at a time.
#include "gpu_threads.h"
#include "sample.cu"

using namespace blink;

constexpr int kThreads = 64;
constexpr uint32_t kParts = 3;

struct Found {
  float floor;  // of what can be drawn, if something can
  float value;  // of what won, with noise
  int32_t token;
  float largest, mass;
  int32_t top_tokens[kMaxLogprobs];
  float top_logprobs[kMaxLogprobs];
};

// What the kernel does, and the floor on the way.
static void run(const SampleArgs& args, Found& found) {
  const size_t bytes = kHeadBytes + (args.vocab_size / 4 + kRowCluster - 1) / kRowCluster * sizeof(Raw<Bf16>);
  for (unsigned task = 0; task < 2; task++)
    run_cluster(kRowCluster, kThreads, bytes, [&] {
      blockIdx.y = task;
      sample_rows<Bf16, kThreads>(args);
    });
  found.value = args.best[0], found.token = args.tokens[0], found.largest = args.largest[0], found.mass = args.mass[0];
  if (!is_finite(found.value) || args.params[0].sampling.temperature == 0) return;
  run_cluster(kRowCluster, kThreads, bytes, [&] {
    using Group = ClusterGroup<kThreads>;
    const Group group;
    auto& shared = *reinterpret_cast<RowShared<Group>*>(block->shared());
    const bool changed = args.changed[0] != 0;
    RowPart<Bf16> part(group, (changed ? args.width : args.vocab_size) / 4,
                       reinterpret_cast<Bf16*>(block->shared() + kHeadBytes));
    if (changed)
      part.keep_outside(args.scaled);
    else
      part.stage(group, static_cast<const Bf16*>(args.logits));
    const Sampling& p = args.params[0].sampling;
    const float factor = changed ? 1 : 1 / p.temperature;
    const float floor = find_floor(group, shared, part, find_extremes(group, shared, part), factor, p);
    if (threadIdx.x == 0 && cluster_rank() == 1) found.floor = floor;
  });
}

// Sample a row of bf16: as the model made it, or from what was changed.
extern "C" void sample_row(const uint16_t* logits, uint32_t vocab_size, const float* scaled, uint32_t width,
                           const Sampling* sampling, int32_t step, Found* found) {
  BatchHeader header{};
  SlotParams params{};
  header.num_rows = 1;
  params.sampling = *sampling;
  const int32_t slot = 0, changed = scaled != nullptr;
  float best[kParts]{}, largest[kParts]{}, mass[kParts]{};
  int32_t tokens[kParts]{};
  run({logits, scaled, &changed, &header, &slot, &step, &params, best, tokens, largest, mass, found->top_tokens,
       found->top_logprobs, vocab_size, vocab_size, width, kParts},
      *found);
  const bool draws = sampling->temperature > 0, ranks = sampling->num_logprobs >= 0 && is_finite(largest[0]);
  for (uint32_t part = 1; part < kParts; part++)
    if ((draws && best[part] != -kInfinity) || (ranks && mass[part] > 0)) std::abort();
}
