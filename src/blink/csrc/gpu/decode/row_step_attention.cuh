// SPDX-License-Identifier: Apache-2.0
// Attention of row_step.cuh: blocks that share a KV head's keys exchange their parts, and each adds up some outputs.
#pragma once

#include "row_step_shape.cuh"

namespace blink {

// Where a block attends.
template <class S>
struct Attending {
  using A = typename S::Attention;
  Place<A> at;
  bool active, owner;
  int block;  // of tile `lane`

  __device__ explicit Attending(const AttentionArgs& args)
      : at(find_place<A>(args, 0, blockIdx.x / S::parts, blockIdx.x % S::parts)),
        active(at.head < S::kv_heads),
        owner(active && at.owns_newest()) {
    if (!active || at.warp >= A::warps) at.count = 0;
    block = load_block(at, at.lane);
  }

  // Start to copy a layer's first tile.
  __device__ void copy_first(const AttentionArgs& args, RowStepShared<S>& shared) const {
    if (at.lane == 0 && at.count > 0) copy_tile(args, at, 0, block, shared.attention);
  }
};

// Take the block's heads from the QKV product: queries, and of the newest token key and value, which go to the cache.
template <class S>
__device__ inline void take_heads(const AttentionArgs& args, const Attending<S>& here, const Word* words, unsigned tag,
                                  RowStepShared<S>& shared) {
  using A = typename S::Attention;
  constexpr int words_each = A::dims / 2;
  const Place<A>& at = here.at;
  const Angles<A> angles = load_angles(args, at);
  const long slot = args.kv_slots[0];
  Bf16* cell = slot < 0 ? nullptr : static_cast<Bf16*>(args.cache) + slot * A::token + at.head * A::head_dim;
  for (int head = at.warp; head < A::group + 2 * here.owner; head += kStepWarps) {
    const int kind = max(head - A::group + 1, 0);  // query, key, value
    const int of_all = kind == 0 ? at.head * A::group + head : (A::group + kind - 1) * A::kv_heads + at.head;
    const Word* from = words + S::of_qkv + of_all * (A::head_dim / 2) + at.lane * words_each;
    Word found[1][words_each];
    await_words(found, tag, [&](int) { return from; });
    unsigned pairs[words_each];
#pragma unroll
    for (int i = 0; i < words_each; i++) pairs[i] = unsigned(found[0][i]);
    if (kind < 2) turn_head<A>(kind ? args.key_norm : args.query_norm, args.eps, angles, at.lane, pairs);
    Bf16* to = kind == 0   ? shared.attention.queries[head]
               : kind == 1 ? shared.attention.new_key
                           : shared.attention.new_value;
    keep_head<A>(pairs, at.lane, to, kind == 0 || !cell ? nullptr : cell + (kind == 2 ? args.values : 0));
  }
}

// Add up the block's parts, and give each block of the KV head the outputs that it writes.
template <class S>
__device__ inline void give_parts(const Place<typename S::Attention>& at, Word* words, unsigned tag,
                                  RowStepShared<S>& shared) {
  using A = typename S::Attention;
  auto& own = shared.attention;
  for (int i = fresh_thread() * 4; i < A::outputs; i += kStepThreads * 4) {
    const int head = i / A::head_dim, dim = i % A::head_dim;
    float best = kLowest, total = 0;
    float4 attended = {};
#pragma unroll
    for (int warp = 0; warp < A::warps; warp++) best = fmaxf(best, own.best[warp][head]);
#pragma unroll
    for (int warp = 0; warp < A::warps; warp++) {
      const float weight = exp2f(own.best[warp][head] - best);
      const float4 part = *reinterpret_cast<const float4*>(&own.parts[warp][head * (A::head_dim + 4) + dim]);
      total += weight * own.total[warp][head];
      attended.x += weight * part.x, attended.y += weight * part.y;
      attended.z += weight * part.z, attended.w += weight * part.w;
    }
    Word* to =
        words + S::of_parts + ((at.head * S::parts + i / A::share) * S::parts + at.rank) * A::share + i % A::share;
    give_pair(to, __float_as_uint(attended.x), __float_as_uint(attended.y), tag);
    give_pair(to + 2, __float_as_uint(attended.z), __float_as_uint(attended.w), tag);
    if (dim == 0)
      give_pair(words + S::of_weights + ((at.head * S::parts + at.rank) * A::group + head) * 2, __float_as_uint(best),
                __float_as_uint(total), tag);
  }
}

// Add up what all blocks of the KV head have of this block's outputs, and give these to all.
template <class S>
__device__ inline void give_attended(const AttentionArgs& args, const Place<typename S::Attention>& at, Word* words,
                                     unsigned tag) {
  using A = typename S::Attention;
  const int i = fresh_thread(), output = at.rank * A::share + i;
  static_assert(A::share <= kStepThreads);
  if (i / 32 * 32 >= A::share) return;
  Word parts[S::parts][1], weights[S::parts][2];
  const int mine = min(i, A::share - 1), head = min(output, A::outputs - 1) / A::head_dim;
  const Word* from = words + S::of_parts + (at.head * S::parts + at.rank) * S::parts * A::share + mine;
  const Word* of_weights = words + S::of_weights + (at.head * S::parts * A::group + head) * 2;
  const auto of_part = [&](int rank) { return from + rank * A::share; };
  const auto of_weight = [&](int rank) { return of_weights + rank * A::group * 2; };
  load_all(parts, of_part);
  load_all(weights, of_weight);
  await_loaded(parts, tag, of_part);
  await_loaded(weights, tag, of_weight);
  float best = kLowest, total = 0, attended = 0;
#pragma unroll
  for (int rank = 0; rank < S::parts; rank++) best = fmaxf(best, __uint_as_float(unsigned(weights[rank][0])));
#pragma unroll
  for (int rank = 0; rank < S::parts; rank++) {
    const float weight = exp2f(__uint_as_float(unsigned(weights[rank][0])) - best);
    total += weight * __uint_as_float(unsigned(weights[rank][1]));
    attended += weight * __uint_as_float(unsigned(parts[rank][0]));
  }
  const float value = total > 0 ? attended * args.value_scale / total : 0, next = __shfl_down_sync(~0u, value, 1);
  if (i % 2 == 0 && i < A::share)
    give(words + S::of_attended + (at.head * A::outputs + output) / 2, to_bf16_pair(value, next), tag);
}

template <class S>
__device__ inline void attend_all(const AttentionArgs& args, const Attending<S>& here, int layer, Word* words,
                                  unsigned tag, RowStepShared<S>& shared) {
  if (!here.active) return;
  take_heads(args, here, words, tag, shared);
  sync_warps<kStepWarps>();
  if (here.at.warp < kAttendWarps) {
    Running<typename S::Attention> running;
    attend_tiles(args, here.at, here.block, layer * here.at.count, shared.attention, running);
    leave_part(here.at, shared.attention, running);
    fence_shared_writes();  // the next layer's first tile comes there
  }
  sync_warps<kStepWarps>();
  give_parts<S>(here.at, words, tag, shared);
  give_attended<S>(args, here.at, words, tag);
}

}  // namespace blink
