// SPDX-License-Identifier: Apache-2.0
// From the QKV projection to what attention works on: head norms, rotation, and the write to the KV cache.
#pragma once

#include "kernels/attention/attention_fp8.cuh"

namespace blink {

template <class S>
struct Angles {  // of a lane's dims
  float cosines[S::dims], sines[S::dims];
};

template <class S>
__device__ inline Angles<S> load_angles(const AttentionArgs& args, int row, int lane) {
  constexpr int half = S::rotary_dim / 2;
  const int dim = lane * S::dims;
  const float* from = args.rotary + long(args.positions[row]) * S::rotary_dim;
  Angles<S> angles;
#pragma unroll
  for (int i = 0; i < S::dims; i++) {
    angles.cosines[i] = dim < 2 * half ? from[dim % half + i] : 1;
    const float sine = dim < 2 * half ? from[half + dim % half + i] : 0;
    angles.sines[i] = dim < half ? -sine : sine;
  }
  return angles;
}

// Load a head's part of a lane.
template <class S>
__device__ inline void load_head(const Bf16* from, int lane, unsigned (&pairs)[S::dims / 2]) {
#pragma unroll
  for (int i = 0; i < S::dims / 2; i++) pairs[i] = load_pair_from_l2(from + lane * S::dims + 2 * i);
}

// Normalise, if the model does, and rotate one head; a warp's lanes hold its dims. Rounds where single operations
// would.
template <class S>
__device__ inline void prepare_head(const Bf16* norm, float eps, const Angles<S>& angles, int lane,
                                    unsigned (&pairs)[S::dims / 2]) {
  constexpr int half = S::rotary_dim / 2 / S::dims;  // in lanes
  float values[S::dims], square_sums = 0;
#pragma unroll
  for (int i = 0; i < S::dims; i += 2) {
    values[i] = low_float(pairs[i / 2]);
    values[i + 1] = high_float(pairs[i / 2]);
    square_sums += values[i] * values[i] + values[i + 1] * values[i + 1];
  }
  if (S::norm) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) square_sums += __shfl_xor_sync(~0u, square_sums, step);
    const float rate = rsqrtf(square_sums / S::head_dim + eps);
#pragma unroll
    for (int i = 0; i < S::dims; i++)
      values[i] = to_float(to_bf16(values[i] * rate * to_float(norm[lane * S::dims + i])));
  }
  float rotated[S::dims];
#pragma unroll
  for (int i = 0; i < S::dims; i++) {
    const float other = __shfl_sync(~0u, values[i], lane < half ? lane + half : lane - half);
    rotated[i] = values[i] * angles.cosines[i] + (lane < 2 * half ? other * angles.sines[i] : 0);
  }
#pragma unroll
  for (int i = 0; i < S::dims / 2; i++) pairs[i] = to_bf16_pair(rotated[2 * i], rotated[2 * i + 1]);
}

// Keep a lane's part of a query, key or value in shared memory, and in the cache where also_to is given.
template <class S>
__device__ inline void keep_head(const unsigned (&pairs)[S::dims / 2], Bf16* to, Bf16* also_to) {
#pragma unroll
  for (int i = 0; i < S::dims / 2; i++) {
    reinterpret_cast<unsigned*>(to)[i] = pairs[i];
    if (also_to) reinterpret_cast<unsigned*>(also_to)[i] = pairs[i];
  }
}

// Keep a lane's part of a key or value in the cache's type, likewise.
template <class S>
__device__ inline void keep_cell(const unsigned (&pairs)[S::dims / 2], float rate, typename S::Cell* to,
                                 typename S::Cell* also_to) {
  if constexpr (S::fp8)
    keep_cells<S>(pairs, rate, to, also_to);
  else
    keep_head<S>(pairs, to, also_to);
}

// Where a lane's part of a token's key goes in the cache; null: nowhere.
template <class S>
__device__ inline typename S::Cell* find_cell(const AttentionArgs& args, int row, int head, int lane) {
  const long slot = args.kv_slots[row];
  if (slot < 0) return nullptr;
  return static_cast<typename S::Cell*>(args.cache) + slot * S::token + head * S::head_dim + lane * S::dims;
}

// Prepare the queries, and in the block that owns the new token its key; write key and value to the cache, unless they
// are stored there.
template <bool kStored, class S>
__device__ inline void prepare_heads(const AttentionArgs& args, const Place<S>& at, const Angles<S>& angles, bool owner,
                                     AttentionShared<S>& shared) {
  constexpr int width = (S::group + 2) * S::token;
  const Bf16* qkv = args.qkv + long(at.row) * width;
  const int part = at.lane * S::dims;
  typename S::Cell* cell = kStored ? nullptr : find_cell<S>(args, at.row, at.head, at.lane);
  constexpr int most = (S::group + S::warps) / S::warps;  // heads of a warp, all loaded before the first is prepared
  unsigned heads[most][S::dims / 2], value[S::dims / 2];
#pragma unroll
  for (int i = 0; i < most; i++) {
    const int head = min(at.warp + i * S::warps, S::group);
    const int place = head == S::group ? S::group * S::kv_heads + at.head : at.head * S::group + head;
    load_head<S>(qkv + place * S::head_dim, at.lane, heads[i]);
  }
  load_head<S>(qkv + ((S::group + 1) * S::kv_heads + at.head) * S::head_dim, at.lane, value);
#pragma unroll
  for (int i = 0; i < most; i++) {
    const int head = at.warp + i * S::warps;
    if (head >= S::group + int(owner)) break;
    const bool is_key = head == S::group;
    auto& pairs = heads[i];
    prepare_head<S>(is_key ? args.key_norm : args.query_norm, args.eps, angles, at.lane, pairs);
    if (is_key)
      keep_cell<S>(pairs, args.key_rate, shared.new_key + part, cell);
    else if constexpr (S::fp8)
      keep_query<S>(pairs, at.lane, shared.queries[head]);
    else
      keep_head<S>(pairs, shared.queries[head] + part, nullptr);
  }
  if (owner && at.warp == S::warps - 1)
    keep_cell<S>(value, args.value_rate, shared.new_value + part, cell ? cell + args.values : nullptr);
}

// Write a token's key and value of one head to the cache. A warp does.
template <class S>
__device__ inline void store_head(const AttentionArgs& args, int row, int head, int lane) {
  constexpr int width = (S::group + 2) * S::token;
  typename S::Cell* cell = find_cell<S>(args, row, head, lane);
  if (!cell) return;
  const Bf16* from = args.qkv + long(row) * width + (S::group * S::kv_heads + head) * S::head_dim;
  unsigned key[S::dims / 2], value[S::dims / 2];
  load_head<S>(from, lane, key);
  load_head<S>(from + S::token, lane, value);
  prepare_head<S>(args.key_norm, args.eps, load_angles<S>(args, row, lane), lane, key);
  keep_cell<S>(key, args.key_rate, cell, nullptr);
  keep_cell<S>(value, args.value_rate, cell + args.values, nullptr);
}

}  // namespace blink
