// SPDX-License-Identifier: Apache-2.0
// Weights in GGUF's blocks as the model uses them: GEMMs, rows of an embedding, tiles for large GEMMs. Chooses the
// instruction set and shares rows out among threads.
#pragma once

#include "cpu/gguf/kernels.h"
#include "cpu/thread_pool.h"

namespace blink {

// Parts of one number of columns, stacked; they follow the struct.
struct GgufWeight {
  uint64_t columns, num_parts;
  const GgufRows* parts() const { return reinterpret_cast<const GgufRows*>(this + 1); }
  uint64_t row_bytes(const GgufRows& part) const {
    const BlockSize size = block_size(part.format);
    return columns / size.values * size.bytes;
  }
};

enum class Isa : uint32_t { kBest, kPlain, kAvx2, kAvx512 };

// Null if this machine or this build lacks the instruction set.
inline const GgufKernels* find_gguf_kernels(Isa isa) {
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  const bool has_avx2 = false, has_avx512 = false;
#endif
  const GgufKernels* found = nullptr;
  if (has_avx512 && (isa == Isa::kBest || isa == Isa::kAvx512)) found = avx512_gguf_kernels();
  if (has_avx2 && found == nullptr && (isa == Isa::kBest || isa == Isa::kAvx2)) found = avx2_gguf_kernels();
  if (found == nullptr && (isa == Isa::kBest || isa == Isa::kPlain)) found = plain_gguf_kernels();
  return found;
}

constexpr uint64_t kChunkBytes = 16384, kTile = 16;

inline uint64_t count_rows(const GgufWeight& weight) {
  uint64_t rows = 0;
  for (uint64_t i = 0; i < weight.num_parts; ++i) rows += weight.parts()[i].rows;
  return rows;
}

// Call work(some rows of a part, how many rows of the weight lie before them) for all, about kChunkBytes at a time:
// many more than there are threads, so that one that is disturbed takes fewer of them. tile: rows that should not be
// parted.
template <class Work>
void share_rows(const GgufWeight& weight, ThreadPool& pool, uint64_t tile, const Work& work) {
  const auto chunk_rows = [&](const GgufRows& part) {
    return (kChunkBytes / weight.row_bytes(part) + tile) / tile * tile;
  };
  uint64_t chunks = 0;
  for (uint64_t i = 0; i < weight.num_parts; ++i) {
    const GgufRows& part = weight.parts()[i];
    chunks += (part.rows + chunk_rows(part) - 1) / chunk_rows(part);
  }
  pool.share(chunks, [&](uint64_t chunk) {
    uint64_t before = 0;
    for (const GgufRows* part = weight.parts();; before += part->rows, ++part) {
      const uint64_t rows = chunk_rows(*part), own = (part->rows + rows - 1) / rows;
      if (chunk < own) {
        const uint64_t first = chunk * rows, count = least(rows, part->rows - first);
        return work(GgufRows{part->blocks + first * weight.row_bytes(*part), part->format, count}, before + first);
      }
      chunk -= own;
    }
  });
}

// out [x_rows, rows of the weight] = x [x_rows, columns] times the weight's transpose.
inline void multiply(const GgufKernels& kernels, const GgufWeight& weight, const float* x, uint32_t x_rows, float* out,
                     ThreadPool& pool) {
  const uint64_t rows = count_rows(weight);
  share_rows(weight, pool, kTile, [&](const GgufRows& part, uint64_t first) {
    kernels.multiply({part, uint32_t(weight.columns), x_rows, x, out + first, rows});
  });
}

inline void dequantize(const GgufKernels& kernels, const GgufWeight& weight, float* out, ThreadPool& pool) {
  share_rows(weight, pool, kTile, [&](const GgufRows& part, uint64_t first) {
    kernels.dequantize(part, uint32_t(weight.columns), out + first * weight.columns);
  });
}

// Dequantise single rows; returns how many of them the weight has: all, or those before the first that it lacks.
inline uint32_t take_rows(const GgufKernels& kernels, const GgufWeight& weight, const int32_t* rows, uint32_t count,
                          float* out) {
  for (uint32_t i = 0; i < count; ++i, out += weight.columns) {
    uint64_t row = uint64_t(int64_t(rows[i])), p = 0;
    for (; p < weight.num_parts && row >= weight.parts()[p].rows; ++p) row -= weight.parts()[p].rows;
    if (rows[i] < 0 || p == weight.num_parts) return i;
    const GgufRows& part = weight.parts()[p];
    kernels.dequantize({part.blocks + row * weight.row_bytes(part), part.format, 1}, uint32_t(weight.columns), out);
  }
  return count;
}

}  // namespace blink
