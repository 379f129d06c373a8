// SPDX-License-Identifier: Apache-2.0
// Attention of rows of one query each on a CPU: keys and values are read where the cache has them, in float32 or
// float16. All sums are float32.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/cells.h"
#include "cpu/thread_pool.h"

namespace blink {

// cache: [2, cache_rows / block_size, block_size, kv_heads, head_dim]; blocks: [rows, row_blocks], those of each row's
// context; positions: [rows], of the queries; sinks: [kv_heads * group], may be null; window: 0 if there is none.
template <class Cell>
struct RowAttention {
  const float* query;
  uint64_t query_stride;  // from row to row
  const Cell* cache;
  uint64_t cache_rows;
  const int32_t* blocks;
  const int64_t* positions;
  const float* sinks;
  float* out;  // [rows, kv_heads * group, head_dim]
  uint32_t rows, row_blocks, block_size, kv_heads, group, head_dim, window;
  float scale, softcap;
};

// One row and one head of keys, whose `group` queries share it; where its keys are in the cache, and room for scores.
struct SharedHead {
  uint32_t row, kv_head, keys;
  std::vector<uint64_t> places;  // [keys]
  std::vector<float> scores;     // [group, keys]
};

// What each query gives each key: the whole context, or the window's part of it.
template <class Cell>
SharedHead find_keys(const RowAttention<Cell>& a, uint32_t row, uint32_t kv_head) {
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

constexpr uint32_t kMostVectors = 512 / kCellLanes;  // of a head

template <class Cell>
BLINK_INLINE void score_cells(const RowAttention<Cell>& a, SharedHead& shared) {
  typedef float Half __attribute__((vector_size(2 * kCellLanes)));
  const uint32_t vectors = a.head_dim / kCellLanes;
  const float* query = a.query + shared.row * a.query_stride + uint64_t(shared.kv_head) * a.group * a.head_dim;
  CellLanes own[kMostVectors];
  for (uint32_t key = 0; key < shared.keys; ++key) {
    for (uint32_t i = 0; i < vectors; ++i) load_cells(a.cache + shared.places[key] + i * kCellLanes, own[i]);
    for (uint32_t head = 0; head < a.group; ++head) {
      const auto* other = reinterpret_cast<const CellLanes*>(query + head * a.head_dim);
      CellLanes sums = {};
      for (uint32_t i = 0; i < vectors; ++i) sums += own[i] * other[i];
      Half halves[2];
      std::memcpy(halves, &sums, sizeof sums);
      const Half half = halves[0] + halves[1];
      const float sum = (half[0] + half[4]) + (half[1] + half[5]) + ((half[2] + half[6]) + (half[3] + half[7]));
      shared.scores[uint64_t(head) * shared.keys + key] = sum * a.scale;
    }
  }
}

BLINK_CLONES inline void score_keys(const RowAttention<float>& a, SharedHead& shared) { score_cells(a, shared); }
BLINK_CLONES inline void score_keys(const RowAttention<uint16_t>& a, SharedHead& shared) { score_cells(a, shared); }

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

// Sum up the values of kHeads queries: each is read once for all of them.
template <uint32_t kHeads, class Cell>
BLINK_INLINE void weigh_heads(const RowAttention<Cell>& a, const SharedHead& shared, uint32_t first) {
  const Cell* values = a.cache + a.cache_rows * a.kv_heads * a.head_dim;
  float* out = a.out + ((uint64_t(shared.row) * a.kv_heads + shared.kv_head) * a.group + first) * a.head_dim;
  const float* weights = shared.scores.data() + uint64_t(first) * shared.keys;
  for (uint32_t i = 0; i < a.head_dim; i += kCellLanes) {
    CellLanes sums[2][kHeads] = {};  // of even keys and of odd ones, as an addition takes longer than what it adds
    const auto add = [&](uint32_t key, CellLanes* into) __attribute__((always_inline)) {
      CellLanes own;
      load_cells(values + shared.places[key] + i, own);
      for (uint32_t head = 0; head < kHeads; ++head) into[head] += own * weights[uint64_t(head) * shared.keys + key];
    };
    uint32_t key = 0;
    for (; key + 1 < shared.keys; key += 2) {
      add(key, sums[0]);
      add(key + 1, sums[1]);
    }
    if (key < shared.keys) add(key, sums[0]);
    for (uint32_t head = 0; head < kHeads; ++head)
      *reinterpret_cast<CellLanes*>(out + head * a.head_dim + i) = sums[0][head] + sums[1][head];
  }
}

template <class Cell>
BLINK_INLINE void weigh_cells(const RowAttention<Cell>& a, const SharedHead& shared) {
  uint32_t head = 0;
  for (; head + 4 <= a.group; head += 4) weigh_heads<4>(a, shared, head);
  if (a.group - head == 3) return weigh_heads<3>(a, shared, head);
  if (a.group - head == 2) return weigh_heads<2>(a, shared, head);
  if (a.group - head == 1) weigh_heads<1>(a, shared, head);
}

BLINK_CLONES inline void weigh_values(const RowAttention<float>& a, const SharedHead& h) { weigh_cells(a, h); }
BLINK_CLONES inline void weigh_values(const RowAttention<uint16_t>& a, const SharedHead& h) { weigh_cells(a, h); }

template <class Cell>
void attend_rows(const RowAttention<Cell>& a, ThreadPool& pool) {
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
