// SPDX-License-Identifier: Apache-2.0
// Weights in GGUF's blocks as the model uses them: products, rows of an embedding, tiles for large products. Chooses the
// instruction set and shares rows out among threads.
#pragma once

#include <atomic>

#include "cpu/blocks/kernels.h"
#include "region/platform.h"

namespace blink {

// Parts of one number of columns, stacked; they follow the struct.
struct BlockWeight {
  uint64_t columns, num_parts;
  const BlockRows* parts() const { return reinterpret_cast<const BlockRows*>(this + 1); }
  uint64_t row_bytes(const BlockRows& part) const {
    const BlockSize size = block_size(part.format);
    return columns / size.values * size.bytes;
  }
};

enum class Isa : uint32_t { kBest, kPlain, kAvx2, kAvx512 };

// Null if this machine or this build lacks the instruction set.
inline const BlockKernels* find_block_kernels(Isa isa) {
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  const bool has_avx2 = false, has_avx512 = false;
#endif
  const BlockKernels* found = nullptr;
  if (has_avx512 && (isa == Isa::kBest || isa == Isa::kAvx512)) found = avx512_block_kernels();
  if (has_avx2 && found == nullptr && (isa == Isa::kBest || isa == Isa::kAvx2)) found = avx2_block_kernels();
  if (found == nullptr && (isa == Isa::kBest || isa == Isa::kPlain)) found = plain_block_kernels();
  return found;
}

// GOMP_parallel of the OpenMP that PyTorch computes with: a team of our own would wait for cores that its threads hold.
using RunTeam = void (*)(void (*work)(void*), void* context, unsigned threads, unsigned flags);
struct Team {
  RunTeam run;  // null: the calling thread is alone
  uint32_t threads;
};

// Call work(chunk) for each chunk; a thread that is disturbed takes fewer of them.
template <class Work>
void share_chunks(Team team, uint64_t chunks, const Work& work) {
  std::atomic<uint64_t> next{0};
  auto take = [&] {
    for (uint64_t chunk = next++; chunk < chunks; chunk = next++) work(chunk);
  };
  if (team.run == nullptr || team.threads < 2 || chunks < 2) return take();
  using Take = decltype(take);
  team.run([](void* context) { (*static_cast<Take*>(context))(); }, &take, team.threads, 0);
}

constexpr uint64_t kChunkBytes = 16384;

// Call work(part, rows in front of the part, rows of the chunk) for runs of rows of about kChunkBytes.
template <class Work>
void share_rows(const BlockWeight& weight, Team team, const Work& work) {
  const auto chunk_rows = [&](const BlockRows& part) {
    return (kChunkBytes / weight.row_bytes(part) + 4) / 4 * 4;  // whole tiles
  };
  uint64_t chunks = 0;
  for (uint64_t i = 0; i < weight.num_parts; ++i) {
    const BlockRows& part = weight.parts()[i];
    chunks += (part.rows + chunk_rows(part) - 1) / chunk_rows(part);
  }
  share_chunks(team, chunks, [&](uint64_t chunk) {
    uint64_t before = 0;
    for (const BlockRows* part = weight.parts();; before += part->rows, ++part) {
      const uint64_t rows = chunk_rows(*part), own = (part->rows + rows - 1) / rows;
      if (chunk < own) {
        const uint64_t first = chunk * rows, count = least(rows, part->rows - first);
        return work(BlockRows{part->blocks + first * weight.row_bytes(*part), part->format, count}, before + first);
      }
      chunk -= own;
    }
  });
}

// out [x_rows, rows of the weight] = x [x_rows, columns] times the weight's transpose.
inline void multiply(const BlockKernels& kernels, const BlockWeight& weight, const float* x, uint32_t x_rows,
                     float* out, Team team) {
  uint64_t rows = 0;
  for (uint64_t i = 0; i < weight.num_parts; ++i) rows += weight.parts()[i].rows;
  share_rows(weight, team, [&](const BlockRows& part, uint64_t first) {
    kernels.multiply({part, uint32_t(weight.columns), x_rows, x, out + first, rows});
  });
}

inline void dequantize(const BlockKernels& kernels, const BlockWeight& weight, float* out, Team team) {
  share_rows(weight, team, [&](const BlockRows& part, uint64_t first) {
    kernels.dequantize(part, uint32_t(weight.columns), out + first * weight.columns);
  });
}

// Dequantise single rows; returns how many of them the weight has: all, or those before the first that it lacks.
inline uint32_t take_rows(const BlockKernels& kernels, const BlockWeight& weight, const int32_t* rows, uint32_t count,
                          float* out) {
  for (uint32_t i = 0; i < count; ++i, out += weight.columns) {
    uint64_t row = uint64_t(int64_t(rows[i])), p = 0;
    for (; p < weight.num_parts && row >= weight.parts()[p].rows; ++p) row -= weight.parts()[p].rows;
    if (rows[i] < 0 || p == weight.num_parts) return i;
    const BlockRows& part = weight.parts()[p];
    kernels.dequantize({part.blocks + row * weight.row_bytes(part), part.format, 1}, uint32_t(weight.columns), out);
  }
  return count;
}

}  // namespace blink
