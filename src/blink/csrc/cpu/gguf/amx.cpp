// SPDX-License-Identifier: Apache-2.0
// GEMMs in bfloat16 on AMX tiles; compiled for these, so nothing here may be called before the processor was asked.
//
// 32 rows of the weight become bfloat16 and are laid out as tiles want them, once for all rows of x. A tile of x holds
// 16 rows of 32 columns, one of the weight 16 pairs of columns of 16 rows, and a tile of sums 16 x 16 floats.
#include "cpu/gguf/kernels.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

#include "cpu/gguf/avx512.h"
#include "cpu/gguf/tiles.h"
#include "region/platform.h"

namespace blink {
namespace {

constexpr uint32_t kTileRows = 16, kTileColumns = 32, kTileBytes = 64;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  TileConfig() {
    for (uint32_t i = 0; i < 8; ++i) row_bytes[i] = kTileBytes, rows[i] = kTileRows;
  }
};

struct alignas(kTileBytes) TileLine {
  uint16_t words[kTileColumns];
};

// Swap rows and columns of 16 x 16 words.
BLINK_INLINE void transpose(__m512i* rows) {
  __m512i pairs[16], quads[16];
  unroll<8>([&](auto i) __attribute__((always_inline)) {
    pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  });
  unroll<4>([&](auto i) __attribute__((always_inline)) {
    quads[4 * i] = _mm512_unpacklo_epi64(pairs[4 * i], pairs[4 * i + 2]);
    quads[4 * i + 1] = _mm512_unpackhi_epi64(pairs[4 * i], pairs[4 * i + 2]);
    quads[4 * i + 2] = _mm512_unpacklo_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
    quads[4 * i + 3] = _mm512_unpackhi_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
  });
  unroll<4>([&](auto i) __attribute__((always_inline)) {
    const __m512i even_low = _mm512_shuffle_i32x4(quads[i], quads[4 + i], 0x88);
    const __m512i even_high = _mm512_shuffle_i32x4(quads[8 + i], quads[12 + i], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(quads[i], quads[4 + i], 0xdd);
    const __m512i odd_high = _mm512_shuffle_i32x4(quads[8 + i], quads[12 + i], 0xdd);
    rows[i] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    rows[4 + i] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    rows[8 + i] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    rows[12 + i] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  });
}

// Lay 16 rows of the weight out as tiles, one every second tile of `tiles`; rows that it lacks are zeros.
template <class Format>
void lay_out(const uint8_t* blocks, uint64_t row_bytes, uint32_t num_rows, uint32_t columns, uint16_t* tiles) {
  constexpr uint32_t kGroups = Format::kValues / kGroup;
  for (uint32_t column = 0; column < columns; column += Format::kValues, blocks += Format::kBytes) {
    typename Format::Scales scales[kTileRows];
    for (uint32_t row = 0; row < num_rows; ++row)
      scales[row] = Format::template read_scales<Avx512>(blocks + row * row_bytes);
    for (uint32_t group = 0; group < kGroups; ++group, tiles += 2 * kTileRows * kTileColumns) {
      __m512i words[kTileRows] = {};
      for (uint32_t row = 0; row < num_rows; ++row) {
        Avx512::Float values[kVectors<Avx512>];
        Format::template decode<Avx512>(blocks + row * row_bytes, scales[row], group, values);
        words[row] = __m512i(_mm512_cvtne2ps_pbh(values[1], values[0]));
      }
      transpose(words);
      for (uint32_t row = 0; row < kTileRows; ++row) _mm512_store_si512(tiles + row * kTileColumns, words[row]);
    }
  }
}

// Write a tile's sums that are wanted.
void write_sums(const float* sums, float* out, uint64_t stride, uint64_t rows, uint64_t columns) {
  for (uint64_t row = 0; row < least(rows, uint64_t(kTileRows)); ++row)
    std::memcpy(out + row * stride, sums + row * kTileRows, least(columns, uint64_t(kTileRows)) * sizeof(float));
}

// The sums of 32 rows of x and of 32 rows of the weight.
void multiply_tiles(const Bf16Matmul& p, const uint16_t* tiles, uint32_t row, uint64_t first) {
  const uint16_t* x = p.x + uint64_t(row) * p.columns;
  const uint64_t x_bytes = uint64_t(p.columns) * sizeof(uint16_t);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (uint32_t column = 0; column < p.columns; column += kTileColumns, tiles += 2 * kTileRows * kTileColumns) {
    _tile_loadd(4, x + column, x_bytes);
    _tile_loadd(5, x + kTileRows * uint64_t(p.columns) + column, x_bytes);
    _tile_loadd(6, tiles, kTileBytes);
    _tile_loadd(7, tiles + kTileRows * kTileColumns, kTileBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  alignas(64) float sums[4][kTileRows * kTileRows];
  _tile_stored(0, sums[0], kTileBytes);
  _tile_stored(1, sums[1], kTileBytes);
  _tile_stored(2, sums[2], kTileBytes);
  _tile_stored(3, sums[3], kTileBytes);
  for (uint32_t i = 0; i < 4; ++i) {
    const uint64_t x_row = row + i / 2 * kTileRows, column = first + i % 2 * kTileRows;
    if (x_row < p.x_rows && column < p.weight.rows)
      write_sums(sums[i], p.out + x_row * p.out_stride + column, p.out_stride, p.x_rows - x_row,
                 p.weight.rows - column);
  }
}

template <class Format>
void multiply_format(const Bf16Matmul& p) {
  const uint64_t row_bytes = uint64_t(p.columns / Format::kValues) * Format::kBytes;
  thread_local std::vector<TileLine> memory;
  memory.resize(p.columns);
  uint16_t* tiles = memory.data()->words;
  const TileConfig config;
  _tile_loadconfig(&config);
  for (uint64_t first = 0; first < p.weight.rows; first += 2 * kTileRows) {
    for (uint64_t half = 0; half < 2; ++half) {
      const uint64_t begin = least(first + half * kTileRows, p.weight.rows);
      lay_out<Format>(p.weight.blocks + begin * row_bytes, row_bytes,
                      uint32_t(least(p.weight.rows - begin, uint64_t(kTileRows))), p.columns,
                      tiles + half * kTileRows * kTileColumns);
    }
    for (uint32_t row = 0; row < p.x_rows; row += 2 * kTileRows) multiply_tiles(p, tiles, row, first);
  }
  _tile_release();
}

void multiply_amx(const Bf16Matmul& p) {
  with_format(p.weight.format, [&]<class Format>(Format) { multiply_format<Format>(p); });
}

// The kernel saves tiles for a process only once it has asked for them.
bool ask_for_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const bool has_tiles = (d >> 22 & 1) != 0 && (d >> 24 & 1) != 0;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0 || (a >> 5 & 1) == 0 || !has_tiles) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

MultiplyBf16 amx_bf16_kernel() {
  static const bool has_tiles = ask_for_tiles();
  return has_tiles ? multiply_amx : nullptr;
}

}  // namespace blink
#else
namespace blink {
MultiplyBf16 amx_bf16_kernel() { return nullptr; }
}  // namespace blink
#endif
