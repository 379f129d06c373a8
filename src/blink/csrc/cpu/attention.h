// SPDX-License-Identifier: Apache-2.0
// Attention of rows of one query each on a CPU: keys and values are read where the cache has them, in float32 or
// float16. All sums are float32.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/cells.h"
#include "cpu/exponential.h"
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
// A thread's next head takes the same room.
struct SharedHead {
  uint32_t row = 0, kv_head = 0, keys = 0, stride = 0;  // stride: of scores from query to query, whole vectors
  std::vector<uint64_t> places;                         // [keys]
  std::vector<float> scores;                            // [group, stride]
};

// What each query gives each key: the whole context, or the window's part of it.
template <class Cell>
void find_keys(const RowAttention<Cell>& a, uint32_t row, uint32_t kv_head, SharedHead& head) {
  const uint32_t context = uint32_t(a.positions[row] + 1);
  head.row = row, head.kv_head = kv_head;
  head.keys = a.window != 0 && context > a.window ? a.window : context;
  head.stride = (head.keys + kCellLanes - 1) / kCellLanes * kCellLanes;
  head.places.resize(head.keys);
  head.scores.resize(uint64_t(a.group) * head.stride);
  const int32_t* blocks = a.blocks + uint64_t(row) * a.row_blocks;
  const uint64_t apart = uint64_t(a.kv_heads) * a.head_dim;  // from a key to the next one of its block
  for (uint32_t i = 0, key = context - head.keys; i < head.keys;) {
    uint64_t place = (uint64_t(blocks[key / a.block_size]) * a.block_size + key % a.block_size) * apart;
    place += uint64_t(kv_head) * a.head_dim;
    const uint32_t end = std::min(head.keys, i + a.block_size - key % a.block_size);
    for (; i < end; ++i, ++key, place += apart) head.places[i] = place;
  }
}

template <class Cell>
BLINK_INLINE void prefetch_cells(const Cell* cells, uint32_t count) {
  const char* bytes = reinterpret_cast<const char*>(cells);
  for (uint32_t at = 0; at < count * sizeof(Cell); at += 64) __builtin_prefetch(bytes + at);
}

// The sum of each of 16 vectors, in its place.
BLINK_INLINE void add_across(CellLanes (&v)[kCellLanes], CellLanes& out) {
  for (uint32_t i = 0; i < 8; ++i) {
    const CellLanes a = v[2 * i], b = v[2 * i + 1];
    v[i] = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
  for (uint32_t i = 0; i < 4; ++i) {
    const CellLanes a = v[2 * i], b = v[2 * i + 1];
    v[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  for (uint32_t i = 0; i < 2; ++i) {
    const CellLanes a = v[2 * i], b = v[2 * i + 1];
    v[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  out = __builtin_shufflevector(v[0], v[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
        __builtin_shufflevector(v[0], v[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

constexpr uint32_t kColumns = 64;  // of a head that are taken at a time

// Add to sums of kHeads queries and 16 keys what kVectors of their columns from `column` on give.
template <uint32_t kHeads, uint32_t kVectors, class Cell>
BLINK_INLINE void multiply_columns(const RowAttention<Cell>& a, const uint64_t* places, const float* query,
                                   uint32_t column, CellLanes (*sums)[kCellLanes]) {
  CellLanes own[kVectors], other[kHeads][kVectors];
  unroll<kHeads>([&](auto h) __attribute__((always_inline)) {
    unroll<kVectors>([&](auto i) __attribute__((always_inline)) {
      std::memcpy(&other[h][i], query + h * a.head_dim + column + i * kCellLanes, sizeof other[h][i]);
    });
  });
  for (uint32_t key = 0; key < kCellLanes; ++key) {
    const Cell* cells = a.cache + places[key] + column;
    unroll<kVectors>([&](auto i) __attribute__((always_inline)) { load_cells(cells + i * kCellLanes, own[i]); });
    unroll<kHeads>([&](auto h) __attribute__((always_inline)) {
      CellLanes sum = sums[h][key];
      unroll<kVectors>([&](auto i) __attribute__((always_inline)) { sum += own[i] * other[h][i]; });
      sums[h][key] = sum;
    });
  }
}

// Scores of 16 keys from `first` on, or of those that are left, with kHeads queries from `query` on.
template <uint32_t kHeads, class Cell>
BLINK_INLINE void score_tile(const RowAttention<Cell>& a, SharedHead& shared, const float* query, uint32_t head,
                             uint32_t first) {
  CellLanes sums[kHeads][kCellLanes] = {};
  uint64_t places[kCellLanes];
  for (uint32_t key = 0; key < kCellLanes; ++key) places[key] = shared.places[std::min(first + key, shared.keys - 1)];
  uint32_t column = 0;
  for (; column + kColumns <= a.head_dim; column += kColumns)
    multiply_columns<kHeads, kColumns / kCellLanes>(a, places, query, column, sums);
  for (; column < a.head_dim; column += kCellLanes) multiply_columns<kHeads, 1>(a, places, query, column, sums);
  for (uint32_t h = 0; h < kHeads; ++h) {
    CellLanes scores;
    add_across(sums[h], scores);
    scores *= a.scale;
    std::memcpy(shared.scores.data() + uint64_t(head + h) * shared.stride + first, &scores, sizeof scores);
  }
}

// Have the next 16 keys and these keys' values come from memory meanwhile: one head's cells of two keys are no
// neighbours there, so the processor does not foresee them.
template <class Cell>
BLINK_INLINE void prefetch_tile(const RowAttention<Cell>& a, const SharedHead& shared, uint32_t first) {
  const Cell* values = a.cache + a.cache_rows * a.kv_heads * a.head_dim;
  for (uint32_t key = first; key < std::min(first + kCellLanes, shared.keys); ++key) {
    prefetch_cells(values + shared.places[key], a.head_dim);
    if (key + kCellLanes < shared.keys) prefetch_cells(a.cache + shared.places[key + kCellLanes], a.head_dim);
  }
}

// Sums of kHeads queries and kVectors of the values' columns from `column` on.
template <uint32_t kHeads, uint32_t kVectors, class Cell>
BLINK_INLINE void weigh_columns(const RowAttention<Cell>& a, const SharedHead& shared, uint32_t head, uint32_t column) {
  const Cell* values = a.cache + a.cache_rows * a.kv_heads * a.head_dim + column;
  float* out = a.out + ((uint64_t(shared.row) * a.kv_heads + shared.kv_head) * a.group + head) * a.head_dim + column;
  const float* weights = shared.scores.data() + uint64_t(head) * shared.stride;
  CellLanes sums[kHeads][kVectors] = {};
  for (uint32_t key = 0; key < shared.keys; ++key) {
    const Cell* cells = values + shared.places[key];
    unroll<kVectors>([&](auto i) __attribute__((always_inline)) {
      CellLanes own;
      load_cells(cells + i * kCellLanes, own);
      unroll<kHeads>([&](auto h) __attribute__((always_inline)) {
        sums[h][i] += own * weights[uint64_t(h) * shared.stride + key];
      });
    });
  }
  unroll<kHeads>([&](auto h)
                     __attribute__((always_inline)) { std::memcpy(out + h * a.head_dim, sums[h], sizeof sums[h]); });
}

template <uint32_t kHeads, class Cell>
BLINK_INLINE void score_heads(const RowAttention<Cell>& a, SharedHead& shared, uint32_t head) {
  const float* query = a.query + shared.row * a.query_stride;
  query += (uint64_t(shared.kv_head) * a.group + head) * a.head_dim;
  for (uint32_t first = 0; first < shared.keys; first += kCellLanes) {
    prefetch_tile(a, shared, first);
    score_tile<kHeads>(a, shared, query, head, first);
  }
}

template <uint32_t kHeads, class Cell>
BLINK_INLINE void weigh_heads(const RowAttention<Cell>& a, SharedHead& shared, uint32_t head) {
  uint32_t column = 0;
  for (; column + kColumns <= a.head_dim; column += kColumns)
    weigh_columns<kHeads, kColumns / kCellLanes>(a, shared, head, column);
  for (; column < a.head_dim; column += kCellLanes) weigh_columns<kHeads, 1>(a, shared, head, column);
}

// Make weights that sum to 1, with the sink's 1 less, of one query's scores; what is behind the last one becomes 0.
BLINK_INLINE void normalize_scores(float* scores, uint32_t keys, float softcap, const float* sink) {
  if (softcap != 0)
    for (uint32_t key = 0; key < keys; ++key) scores[key] = std::tanh(scores[key] / softcap) * softcap;
  for (uint32_t key = keys; key % kCellLanes != 0; ++key) scores[key] = scores[keys - 1];
  CellLanes some, largest, total = {};
  std::memcpy(&largest, scores, sizeof largest);
  for (uint32_t key = kCellLanes; key < keys; key += kCellLanes) {
    std::memcpy(&some, scores + key, sizeof some);
    largest = largest > some ? largest : some;
  }
  float most = sink != nullptr ? *sink : largest[0];
  for (uint32_t i = 0; i < kCellLanes; ++i) most = std::max(most, largest[i]);
  for (uint32_t key = 0; key < keys; key += kCellLanes) {
    std::memcpy(&some, scores + key, sizeof some);
    some -= most;
    exponentiate(some);
    for (uint32_t i = keys - key; i < kCellLanes; ++i) some[i] = 0;
    total += some;
    std::memcpy(scores + key, &some, sizeof some);
  }
  float sum = sink != nullptr ? std::exp(*sink - most) : 0;
  for (uint32_t i = 0; i < kCellLanes; ++i) sum += total[i];
  const float factor = 1 / sum;
  for (uint32_t key = 0; key < keys; key += kCellLanes) {
    std::memcpy(&some, scores + key, sizeof some);
    some *= factor;
    std::memcpy(scores + key, &some, sizeof some);
  }
}

// kHeads of the queries that share keys.
template <uint32_t kHeads, class Cell>
BLINK_INLINE void attend_heads(const RowAttention<Cell>& a, SharedHead& shared, uint32_t head) {
  score_heads<kHeads>(a, shared, head);
  for (uint32_t h = head; h < head + kHeads; ++h)
    normalize_scores(shared.scores.data() + uint64_t(h) * shared.stride, shared.keys, a.softcap,
                     a.sinks == nullptr ? nullptr : a.sinks + shared.kv_head * a.group + h);
  weigh_heads<kHeads>(a, shared, head);
}

template <class Cell>
BLINK_INLINE void attend_cells(const RowAttention<Cell>& a, SharedHead& shared) {
  uint32_t head = 0;
  for (; head + 4 <= a.group; head += 4) attend_heads<4>(a, shared, head);
  if (a.group - head == 3) return attend_heads<3>(a, shared, head);
  if (a.group - head == 2) return attend_heads<2>(a, shared, head);
  if (a.group - head == 1) attend_heads<1>(a, shared, head);
}

BLINK_CLONES inline void attend_head(const RowAttention<float>& a, SharedHead& shared) { attend_cells(a, shared); }
BLINK_CLONES inline void attend_head(const RowAttention<uint16_t>& a, SharedHead& shared) { attend_cells(a, shared); }

template <class Cell>
void attend_rows(const RowAttention<Cell>& a, ThreadPool& pool) {
  pool.share(uint64_t(a.rows) * a.kv_heads, [&](uint64_t item) {
    thread_local SharedHead shared;
    find_keys(a, uint32_t(item / a.kv_heads), uint32_t(item % a.kv_heads), shared);
    attend_head(a, shared);
  });
}

}  // namespace blink
