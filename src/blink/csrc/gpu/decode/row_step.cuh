// SPDX-License-Identifier: Apache-2.0
// All layers of a step of one row by one kernel, a block for each multiprocessor. Some warps of a block copy its
// weights of all layers, one after the other, to a ring of stages: they wait for room alone, so that the memory is busy
// while the others hand over activations. These go through L2 as words with a tag, which says by itself that a word is
// there (NCCL's protocol LL): no fence, no end of a kernel is waited for.
//
// Every block computes some outputs of every product but the router's, and none before it has read all of its inputs.
// So nobody writes a word anew that another has yet to read.
#pragma once

#include "row_step_attention.cuh"
#include "row_step_experts.cuh"

namespace blink {

// Write the outputs of a product with a norm in front, in pairs.
template <class S, Form kForm, class Write>
__device__ inline void finish_pairs(float eps, GroupShare share, const RowStepShared<S>& shared, Write write) {
  const float rate = norm_rate(eps, shared);
#pragma unroll 1
  for (int pair = fresh_thread(); pair < share.count() * 4; pair += kStepThreads) {
    const float2 sums = add_warps<S, kForm, true>(pair / 4, pair % 4 * 2, shared);
    write(share.first * 4 + pair, float2{sums.x * rate, sums.y * rate});
  }
}

// Of each group of weight rows the first half are gates.
template <class S>
__device__ inline void give_gated(const RowStepArgs& args, GroupShare share, unsigned tag,
                                  const RowStepShared<S>& shared) {
  const float rate = norm_rate(args.eps, shared);
#pragma unroll 1
  for (int pair = fresh_thread(); pair < share.count() * 2; pair += kStepThreads) {
    float2 gate = add_warps<S, S::mlp_form, true>(pair / 2, pair % 2 * 2, shared);
    const float2 up = add_warps<S, S::mlp_form, true>(pair / 2, 4 + pair % 2 * 2, shared);
    gate.x *= rate, gate.y *= rate;
    give(args.words + S::of_gated + share.first * 2 + pair,
         to_bf16_pair(gate.x / (1 + __expf(-gate.x)) * up.x * rate, gate.y / (1 + __expf(-gate.y)) * up.y * rate), tag);
  }
}

// The pair of the residual that a thread keeps.
template <class S>
struct Residual {
  unsigned pair;
  int place;
  bool mine;

  __device__ explicit Residual(const Bf16* from) {
    const GroupShare share(S::hidden / kStageRows);
    place = share.first * 4 + threadIdx.x;
    mine = threadIdx.x < share.count() * 4;
    pair = mine ? load_pair(from + place * 2) : 0;
  }

  __device__ void give_all(Word* to, unsigned tag) const {
    if (mine) give(to + place, pair, tag);
  }

  // Add a product, and give the sum to all.
  template <Form kForm>
  __device__ void add(Word* to, unsigned tag, const RowStepShared<S>& shared) {
    if (!mine) return;
    const float2 sums = add_warps<S, kForm, false>(threadIdx.x / 4, threadIdx.x % 4 * 2, shared);
    pair = to_bf16_pair(low_float(pair) + sums.x, high_float(pair) + sums.y);
    give_all(to, tag);
  }
};

// A layer without experts, from the residual behind attention on.
template <class S>
__device__ inline void compute_mlp(const RowStepArgs& args, const LayerArgs& layer, Handover& handover,
                                   Residual<S>& residual, unsigned& done, RowStepShared<S>& shared) {
  Word* words = args.words;
  take_input<S, S::form, S::hidden, true>(handover, words + S::of_middle, layer.mlp_norm, shared);
  run_product(
      GroupShare(S::mlp / 4), [&](GroupShare some) { multiply_groups<S, S::form, S::hidden>(some, done, shared); },
      [&](GroupShare some) { give_gated<S>(args, some, handover.next_tag(), shared); });
  handover.finish();
  take_input<S, S::form, S::mlp, false>(handover, words + S::of_gated, nullptr, shared);
  run_product(
      GroupShare(S::hidden / kStageRows),
      [&](GroupShare some) { multiply_groups<S, S::form, S::mlp>(some, done, shared); },
      [&](GroupShare) { residual.template add<S::form>(words + S::of_residual, handover.next_tag(), shared); });
  handover.finish();
}

// The same with experts.
template <class S>
__device__ inline void compute_experts(const RowStepArgs& args, const LayerArgs& layer, Handover& handover,
                                       Residual<S>& residual, unsigned& done, RowStepShared<S>& shared) {
  Word* words = args.words;
  const GroupShare of_router(S::experts / kStageRows);
  if (S::mlp_form == Form::kBf16 || of_router.count() > 0)
    take_input<S, Form::kBf16, S::hidden, true>(handover, words + S::of_middle, layer.mlp_norm, shared);
  run_product(
      of_router, [&](GroupShare some) { multiply_groups<S, Form::kBf16, S::hidden>(some, done, shared); },
      [&](GroupShare some) {
        finish_pairs<S, Form::kBf16>(args.eps, some, shared, [&](int place, float2 pair) {
          give(words + S::of_logits + place, to_bf16_pair(pair.x, pair.y), handover.next_tag());
        });
      });
  if (S::mlp_form != Form::kBf16)
    take_input<S, S::mlp_form, S::hidden, true>(handover, words + S::of_middle, layer.mlp_norm, shared);
  if (threadIdx.x < 32) choose(args, handover.next_tag(), shared);
  run_product(
      GroupShare(S::mlp / 4), [&](GroupShare some) { multiply_groups<S, S::mlp_form, S::hidden>(some, done, shared); },
      [&](GroupShare some) { give_gated<S>(args, some, handover.next_tag(), shared); });
  handover.finish();
  take_input<S, S::mlp_form, S::mlp, false>(handover, words + S::of_gated, nullptr, shared);
  run_product(
      GroupShare(S::hidden / kStageRows), [&](GroupShare some) { multiply_downs<S>(some, done, shared); },
      [&](GroupShare) { residual.template add<S::mlp_form>(words + S::of_residual, handover.next_tag(), shared); });
  handover.finish();
}

// What the computing warps do.
template <class S>
__device__ inline void compute_step(const RowStepArgs& args, RowStepShared<S>& shared) {
  const Attending<S> here(args.layers[0].attention);
  here.copy_first(args.layers[0].attention, shared);
  wait_for_prerequisites();
  unsigned done = 0;  // stages
  Word* words = args.words;
  Handover handover(args.handovers);
  Residual<S> residual(args.residual);
  residual.give_all(words + S::of_residual, handover.next_tag());
  handover.finish();
#pragma unroll 1
  for (int i = 0; i < args.num_layers; i++) {
    const LayerArgs& layer = args.layers[i];
    take_input<S, S::form, S::hidden, true>(handover, words + S::of_residual, layer.attention_norm, shared);
    run_product(
        GroupShare(S::qkv / kStageRows),
        [&](GroupShare some) { multiply_groups<S, S::form, S::hidden>(some, done, shared); },
        [&](GroupShare some) {
          finish_pairs<S, S::form>(args.eps, some, shared, [&](int place, float2 pair) {
            const unsigned bias = layer.qkv_bias ? load_pair(layer.qkv_bias + place * 2) : 0;
            give(words + S::of_qkv + place, to_bf16_pair(pair.x + low_float(bias), pair.y + high_float(bias)),
                 handover.next_tag());
          });
        });
    attend_all<S>(layer.attention, here, i, words, handover.next_tag(), shared);
    handover.finish();
    take_input<S, S::form, S::attended, false>(handover, words + S::of_attended, nullptr, shared);
    run_product(
        GroupShare(S::hidden / kStageRows),
        [&](GroupShare some) { multiply_groups<S, S::form, S::attended>(some, done, shared); },
        [&](GroupShare) { residual.template add<S::form>(words + S::of_middle, handover.next_tag(), shared); });
    handover.finish();
    if (i + 1 < args.num_layers) here.copy_first(args.layers[i + 1].attention, shared);
    if constexpr (S::experts)
      compute_experts<S>(args, layer, handover, residual, done, shared);
    else
      compute_mlp<S>(args, layer, handover, residual, done, shared);
  }
  launch_dependents();
  take_input<S, S::head_form, S::hidden, true>(handover, words + S::of_residual, args.norm, shared);
  run_product(
      GroupShare(args.vocab / kStageRows),
      [&](GroupShare some) { multiply_groups<S, S::head_form, S::hidden>(some, done, shared); },
      [&](GroupShare some) {
        finish_pairs<S, S::head_form>(args.eps, some, shared, [&](int place, float2 pair) {
          reinterpret_cast<unsigned*>(args.logits)[place] = to_bf16_pair(pair.x, pair.y);
        });
      });
  // All others have read it: this block has had something of each of them.
  if (blockIdx.x == 0 && threadIdx.x == 0) args.handovers->count = handover.count;
}

// What the copying warps do.
template <class S>
__device__ inline void copy_step(const RowStepArgs& args, RowStepShared<S>& shared) {
  unsigned done = 0;  // stages
#pragma unroll 1
  for (int i = 0; i < args.num_layers; i++) {
    const LayerArgs& layer = args.layers[i];
    copy_product<S, S::form, S::hidden, false>(layer.qkv, S::qkv / kStageRows, done, shared);
    if constexpr (!S::experts) {
      prefetch_stages<S::form, S::attended, false>(layer.output, S::hidden / kStageRows, S::slots, kAheadOutput);
      prefetch_stages<S::form, S::hidden, true>(layer.gate_up, S::mlp / 4, 0, kAheadGate);
    }
    copy_product<S, S::form, S::attended, false>(layer.output, S::hidden / kStageRows, done, shared);
    if constexpr (S::experts) {
      copy_experts<S>(layer, i + 1 < args.num_layers ? &layer + 1 : nullptr, i, done, shared);
    } else {
      copy_product<S, S::form, S::hidden, true>(layer.gate_up, S::mlp / 4, done, shared);
      prefetch_stages<S::form, S::mlp, false>(layer.down, S::hidden / kStageRows, S::slots, kAheadDown);
      copy_product<S, S::form, S::mlp, false>(layer.down, S::hidden / kStageRows, done, shared);
      if (i + 1 < args.num_layers)
        prefetch_stages<S::form, S::hidden, false>((&layer)[1].qkv, S::qkv / kStageRows, S::slots, kAheadQkv);
    }
  }
  copy_product<S, S::head_form, S::hidden, false>(args.lm_head, args.vocab / kStageRows, done, shared);
}

template <class S>
__device__ inline void run_row_step(const RowStepArgs& args, RowStepShared<S>& shared) {
  if (threadIdx.x == kStepThreads) {
    for (int i = 0; i < S::slots; i++) initialize(shared.full[i], 1), initialize(shared.empty[i], kStepWarps);
    for (int i = 0; i < kAttendWarps; i++) initialize(shared.attention.full[i][0], 1);
    initialize(shared.routed, 1);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kStepThreads) {
    take_registers<kStepRegisters>();
    compute_step<S>(args, shared);
  } else {
    give_up_registers<kCopyRegisters>();
    copy_step<S>(args, shared);
  }
}

template <Form kForm, Form kExpertForm, Form kHeadForm, int kHidden, int kMlp, int kExperts, int kTopK, int kQueries,
          int kKvHeads, int kHeadDim, int kRotaryDim, int kBlockSize, int kParts, int kSlots, bool kHeadNorm>
__global__ void __launch_bounds__(kStepThreads + 32 * kCopyWarps, 1)
    row_step(const __grid_constant__ RowStepArgs args) {
  using S = RowStepShape<kForm, kExpertForm, kHeadForm, kHidden, kMlp, kExperts, kTopK, kQueries, kKvHeads, kHeadDim,
                         kRotaryDim, kBlockSize, kParts, kSlots, kHeadNorm>;
  extern __shared__ __align__(1024) char memory[];
  run_row_step<S>(args, *reinterpret_cast<RowStepShared<S>*>(memory));
}

}  // namespace blink
