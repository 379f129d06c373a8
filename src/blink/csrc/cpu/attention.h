// SPDX-License-Identifier: Apache-2.0
// Attention of rows of one query each on a CPU, float32: keys and values are read where the cache has them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/thread_pool.h"

// One source, compiled for several instruction sets, among which the loader chooses.
#if defined(__x86_64__) && __GNUC__ >= 12 && !defined(__clang__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__SANITIZE_ADDRESS__)
#define BLINK_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define BLINK_CLONES
#endif

namespace blink {

// cache: [2, cache_rows / block_size, block_size, kv_heads, head_dim]; blocks: [rows, row_blocks], those of each row's
// context; positions: [rows], of the queries; sinks: [kv_heads * group], may be null; window: 0 if there is none.
struct RowAttention {
  const float* query;
  uint64_t query_stride;  // from row to row
  const float* cache;
  uint64_t cache_rows;
  const int32_t* blocks;
  const int64_t* positions;
  const float* sinks;
  float* out;  // [rows, kv_heads * group, head_dim]
  uint32_t rows, row_blocks, block_size, kv_heads, group, head_dim, window;
  float scale, softcap;
};

constexpr uint32_t kAttentionLanes = 16;

// One row and one head of keys, whose `group` queries share it; where its keys are in the cache, and room for scores.
struct SharedHead {
  uint32_t row, kv_head, keys;
  std::vector<uint64_t> places;  // [keys]
  std::vector<float> scores;     // [group, keys]
};

// What each query gives each key: the whole context, or the window's part of it.
inline SharedHead find_keys(const RowAttention& a, uint32_t row, uint32_t kv_head) {
  const uint32_t context = uint32_t(a.positions[row] + 1);
  const uint32_t keys = a.window != 0 && context > a.window ? a.window : context;
  SharedHead head{row, kv_head, keys, std::vector<uint64_t>(keys), std::vector<float>(uint64_t(a.group) * keys)};
  const int32_t* blocks = a.blocks + uint64_t(row) * a.row_blocks;
  for (uint32_t i = 0; i < keys; ++i) {
    const uint32_t key = context - keys + i;
    const uint64_t slot = uint64_t(blocks[key / a.block_size]) * a.block_size + key % a.block_size;
    head.places[i] = (slot * a.kv_heads + kv_head) * a.head_dim;
  }
  return head;
}

BLINK_CLONES inline void score_keys(const RowAttention& a, SharedHead& shared) {
  typedef float Lanes __attribute__((vector_size(4 * kAttentionLanes), aligned(4)));
  typedef float Half __attribute__((vector_size(2 * kAttentionLanes)));
  const uint32_t vectors = a.head_dim / kAttentionLanes;
  const float* query = a.query + shared.row * a.query_stride + uint64_t(shared.kv_head) * a.group * a.head_dim;
  for (uint32_t key = 0; key < shared.keys; ++key) {
    const auto* own = reinterpret_cast<const Lanes*>(a.cache + shared.places[key]);
    for (uint32_t head = 0; head < a.group; ++head) {
      const auto* other = reinterpret_cast<const Lanes*>(query + head * a.head_dim);
      Lanes sums = {};
      for (uint32_t i = 0; i < vectors; ++i) sums += own[i] * other[i];
      Half halves[2];
      std::memcpy(halves, &sums, sizeof sums);
      const Half half = halves[0] + halves[1];
      const float sum = (half[0] + half[4]) + (half[1] + half[5]) + ((half[2] + half[6]) + (half[3] + half[7]));
      shared.scores[uint64_t(head) * shared.keys + key] = sum * a.scale;
    }
  }
}

// Make weights that sum to 1, with the sink's 1 less, of one query's scores.
inline void normalize_scores(float* scores, uint32_t keys, float softcap, const float* sink) {
  float most = sink != nullptr ? *sink : -std::numeric_limits<float>::infinity(), total = 0;
  for (uint32_t key = 0; key < keys; ++key) {
    if (softcap != 0) scores[key] = std::tanh(scores[key] / softcap) * softcap;
    most = std::max(most, scores[key]);
  }
  for (uint32_t key = 0; key < keys; ++key) total += scores[key] = std::exp(scores[key] - most);
  if (sink != nullptr) total += std::exp(*sink - most);
  const float factor = 1 / total;
  for (uint32_t key = 0; key < keys; ++key) scores[key] *= factor;
}

BLINK_CLONES inline void weigh_values(const RowAttention& a, const SharedHead& shared) {
  typedef float Lanes __attribute__((vector_size(4 * kAttentionLanes), aligned(4)));
  const float* values = a.cache + a.cache_rows * a.kv_heads * a.head_dim;
  float* out = a.out + (uint64_t(shared.row) * a.kv_heads + shared.kv_head) * a.group * a.head_dim;
  for (uint32_t head = 0; head < a.group; ++head, out += a.head_dim) {
    const float* weights = shared.scores.data() + uint64_t(head) * shared.keys;
    for (uint32_t i = 0; i < a.head_dim; i += kAttentionLanes) {
      Lanes even = {}, odd = {};  // two sums, as an addition takes longer than what it adds
      for (uint32_t key = 0; key < shared.keys; ++key) {
        const Lanes term = *reinterpret_cast<const Lanes*>(values + shared.places[key] + i) * weights[key];
        if (key % 2 == 0)
          even += term;
        else
          odd += term;
      }
      *reinterpret_cast<Lanes*>(out + i) = even + odd;
    }
  }
}

inline void attend_rows(const RowAttention& a, ThreadPool& pool) {
  pool.share(uint64_t(a.rows) * a.kv_heads, [&](uint64_t item) {
    SharedHead shared = find_keys(a, uint32_t(item / a.kv_heads), uint32_t(item % a.kv_heads));
    score_keys(a, shared);
    for (uint32_t head = 0; head < a.group; ++head)
      normalize_scores(shared.scores.data() + uint64_t(head) * shared.keys, shared.keys, a.softcap,
                       a.sinks == nullptr ? nullptr : a.sinks + shared.kv_head * a.group + head);
    weigh_values(a, shared);
  });
}

}  // namespace blink
