// SPDX-License-Identifier: Apache-2.0
// The token and the logprobs of each row of logits (sampler/sample.h), by a group of threads. A group is a cluster of
// blocks, which keeps the row in its shared memory, or a block, which reads it where it is. The same row gives the
// same, whatever the other rows are.
#include "kernels/args.h"
#include "kernels/sampler/row_group.cuh"
#include "kernels/sampler/row_part.cuh"
#include "sampler/sample.h"

namespace blink {

constexpr int kHeadBytes = 11776;  // of shared memory, before a row and its changes
static_assert(kHeadBytes % 16 == 0 &&
              sizeof(RowShared<ClusterGroup<1024>>) + sizeof(Best) + sizeof(Changes) <= kHeadBytes);

__device__ inline RowSlot slot_of(const SampleArgs& args, uint64_t row) {
  const auto slot = uint64_t(args.row_slots[row]);
  const int32_t list = args.lists[row];
  return {args.params[slot],
          args.tokens + slot * args.max_model_len,
          args.stop_tokens + slot * kMaxStopTokens,
          args.bias_tokens + slot * kMaxLogitBiases,
          args.bias_values + slot * kMaxLogitBiases,
          uint32_t(args.context_lens[row]),
          list < 0 ? nullptr : args.allowed + uint64_t(list) * ((args.vocab_size + 31) / 32)};
}

// grid: (kBlocks of the group, rows). Shared memory: RowShared, Best, Changes, and from kHeadBytes on words of changes,
// then a cluster's part of the row.
template <class Group, class T, bool kIsAligned, int kBlocksOfSm>
__global__ void __launch_bounds__(Group::kThreads, kBlocksOfSm) sample_rows(const SampleArgs args) {
  extern __shared__ __align__(16) char memory[];
  const Group group;
  auto& shared = *reinterpret_cast<RowShared<Group>*>(memory);
  auto& best = *reinterpret_cast<Best*>(memory + sizeof(shared));
  auto& changes = *reinterpret_cast<Changes*>(memory + kHeadBytes - sizeof(Changes));
  auto* words = reinterpret_cast<ChangeWord*>(memory + kHeadBytes);
  launch_dependents();
  if (Group::kBlocks > 1) cluster_arrive_relaxed();  // all blocks have started once all have waited
  wait_for_prerequisites();
  if (Group::kBlocks > 1) cluster_wait();
  const uint64_t row = blockIdx.y;
  if (row >= args.header->num_rows) return;
  using Part = RowPart<T, Group::kIsStaged, kIsAligned>;
  const Part part(group, static_cast<const T*>(args.logits) + row * args.stride, args.vocab_size,
                  reinterpret_cast<T*>(words + args.change_words));
  const uint64_t values = row * most_changes(args.vocab_size, args.max_model_len);
  sample_row(group, shared, best, part, ChangeMemory{changes, words, args.changes + values},
             {uint32_t(args.may_end[row]), args.sampled_tokens + row, args.sampled_logprobs + row,
              args.top_tokens + row * kMaxLogprobs, args.top_logprobs + row * kMaxLogprobs},
             slot_of(args, row));
}

}  // namespace blink
