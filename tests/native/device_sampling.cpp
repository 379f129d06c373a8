// SPDX-License-Identifier: Apache-2.0
// csrc/kernels/sampler/sample.cu on the host's threads behind a C API, one row at a time.
#include "gpu_threads.h"
#include "kernels/sampler/sample.cu"

using namespace blink;

constexpr int kThreads = 64;

template <class Group, class T, bool kIsAligned, class Kernel>
static void run_rows(const SampleArgs& args, uint32_t num_rows, Kernel kernel) {
  const size_t part = (args.vocab_size / 4 + Group::kBlocks) / Group::kBlocks * sizeof(Raw<T>);
  for (uint32_t row = 0; row < num_rows; row++)
    run_cluster(Group::kBlocks, kThreads, kHeadBytes + sizeof(ChangeWord) * args.change_words + Group::kIsStaged * part,
                [&] {
                  blockIdx.y = row;
                  kernel();
                });
}

template <class Group, class T, bool kIsAligned>
static void sample(const SampleArgs& args, uint32_t num_rows) {
  run_rows<Group, T, kIsAligned>(args, num_rows, [&] { sample_rows<Group, T, kIsAligned, 1>(args); });
}

// Rows of bf16 are read four logits at a time, others one by one: so each way of reading is compiled once.
template <class Group>
static void sample(const SampleArgs& args, char type, uint32_t num_rows) {
  if (type == 'b' && args.vocab_size % 4 == 0) return sample<Group, Bf16, true>(args, num_rows);
  if (type == 'h') return sample<Group, Half, false>(args, num_rows);
  if (type == 'f') return sample<Group, float, false>(args, num_rows);
  std::abort();
}

// The floor of what may be drawn from a row of bf16.
template <class Group>
static float floor_of(const SampleArgs& args) {
  float floor = 0;
  run_rows<Group, Bf16, true>(args, 1, [&] {
    const Group group;
    auto& shared = *reinterpret_cast<RowShared<Group>*>(block->shared());
    using Part = RowPart<Bf16, Group::kIsStaged, true>;
    const Part raw(group, static_cast<const Bf16*>(args.logits), args.vocab_size,
                   reinterpret_cast<Bf16*>(block->shared() + kHeadBytes));
    const auto part = raw.with(nullptr);
    const Sampling& p = args.params[args.row_slots[0]].sampling;
    const float found = find_floor(group, shared, part, find_extremes(group, shared, part), 1 / p.temperature, p);
    if (threadIdx.x == 0 && group.block() == Group::kBlocks - 1) floor = found;
  });
  return floor;
}

extern "C" {
void sample_on_host(const SampleArgs* args, bool by_cluster, char type, uint32_t num_rows) {
  return by_cluster ? sample<ClusterGroup<kThreads>>(*args, type, num_rows)
                    : sample<BlockGroup<kThreads>>(*args, type, num_rows);
}
float find_floor_on_host(const SampleArgs* args, bool by_cluster) {
  return by_cluster ? floor_of<ClusterGroup<kThreads>>(*args) : floor_of<BlockGroup<kThreads>>(*args);
}
}
