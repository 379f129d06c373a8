// SPDX-License-Identifier: Apache-2.0
// GGUF's block formats (ggml-org/ggml, src/ggml-common.h): how 32 weights at a time become vectors of floats. `Isa`
// holds the vectors of an instruction set and what the compiler does not find in them by itself.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/cells.h"
#include "cpu/gguf/kernels.h"

namespace blink {

constexpr uint32_t kGroup = 32;  // weights that are decoded together

template <class Isa>
constexpr uint32_t kVectors = kGroup / Isa::kLanes;

template <class Isa>
BLINK_INLINE float read_half(const uint8_t* bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, sizeof half);
  return Isa::widen_half(half);
}

struct Affine {
  float scale, offset;
};

// scale * quant + offset of 32 quants of 4 bits: the low halves of 16 bytes, then the high ones.
template <class Isa>
BLINK_INLINE void decode_halves(const uint8_t* quants, Affine affine, typename Isa::Float* out) {
  const typename Isa::Nibbles nibbles(affine.scale, affine.offset);
  for (uint32_t i = 0; i < kVectors<Isa> / 2; ++i) {
    const auto bytes = Isa::widen(quants + i * Isa::kLanes);
    out[i] = nibbles.low(bytes);
    out[i + kVectors<Isa> / 2] = nibbles.high(bytes);
  }
}

struct Q4_0 {
  static constexpr BlockSize kSize = block_size(GgufFormat::kQ4_0);
  static constexpr uint32_t kValues = kSize.values, kBytes = kSize.bytes;
  using Scales = Affine;
  template <class Isa>
  static BLINK_INLINE Scales read_scales(const uint8_t* block) {
    const float scale = read_half<Isa>(block);
    return {scale, -8 * scale};
  }
  template <class Isa>
  static BLINK_INLINE void decode(const uint8_t* block, const Scales& scales, uint32_t, typename Isa::Float* out) {
    decode_halves<Isa>(block + 2, scales, out);
  }
};

struct Q4_1 {
  static constexpr BlockSize kSize = block_size(GgufFormat::kQ4_1);
  static constexpr uint32_t kValues = kSize.values, kBytes = kSize.bytes;
  using Scales = Affine;
  template <class Isa>
  static BLINK_INLINE Scales read_scales(const uint8_t* block) {
    return {read_half<Isa>(block), read_half<Isa>(block + 2)};
  }
  template <class Isa>
  static BLINK_INLINE void decode(const uint8_t* block, const Scales& scales, uint32_t, typename Isa::Float* out) {
    decode_halves<Isa>(block + 4, scales, out);
  }
};

struct Q8_0 {
  static constexpr BlockSize kSize = block_size(GgufFormat::kQ8_0);
  static constexpr uint32_t kValues = kSize.values, kBytes = kSize.bytes;
  using Scales = float;
  template <class Isa>
  static BLINK_INLINE Scales read_scales(const uint8_t* block) {
    return read_half<Isa>(block);
  }
  template <class Isa>
  static BLINK_INLINE void decode(const uint8_t* block, Scales scale, uint32_t, typename Isa::Float* out) {
    for (uint32_t i = 0; i < kVectors<Isa>; ++i)
      out[i] = Isa::to_float(Isa::widen_signed(block + 2 + i * Isa::kLanes)) * scale;
  }
};

// 256 weights: two halves of a scale, 12 bytes of 6-bit scales and offsets of 8 groups, then the quants; two groups
// share 32 bytes.
struct Q4_K {
  static constexpr BlockSize kSize = block_size(GgufFormat::kQ4_K);
  static constexpr uint32_t kValues = kSize.values, kBytes = kSize.bytes;
  struct Scales {
    Affine groups[8];
  };
  template <class Isa>
  static BLINK_INLINE Scales read_scales(const uint8_t* block) {
    const float scale = read_half<Isa>(block), offset = -read_half<Isa>(block + 2);
    const uint8_t* packed = block + 4;
    Scales found;
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t low = packed[i], middle = packed[i + 4], high = packed[i + 8];
      found.groups[i] = {scale * float(low & 63), offset * float(middle & 63)};
      found.groups[i + 4] = {scale * float((high & 15) | (low >> 6 << 4)),
                             offset * float(high >> 4 | (middle >> 6 << 4))};
    }
    return found;
  }
  template <class Isa>
  static BLINK_INLINE void decode(const uint8_t* block, const Scales& scales, uint32_t group,
                                  typename Isa::Float* out) {
    const Affine affine = scales.groups[group];
    const typename Isa::Nibbles nibbles(affine.scale, affine.offset);
    const uint8_t* quants = block + 16 + group / 2 * 32;
    for (uint32_t i = 0; i < kVectors<Isa>; ++i)
      out[i] = nibbles.low(Isa::widen(quants + i * Isa::kLanes) >> int32_t(group % 2 * 4));
  }
};

// 256 weights of 6 bits: the low 4 bits of all, the high 2 bits of all, a signed byte of scale for each 16, the scale
// of these. Within 128 weights, a byte of the former holds bits of weights 64 apart, one of the latter of weights 32
// apart.
struct Q6_K {
  static constexpr BlockSize kSize = block_size(GgufFormat::kQ6_K);
  static constexpr uint32_t kValues = kSize.values, kBytes = kSize.bytes;
  struct Scales {
    float of_16[16];
  };
  template <class Isa>
  static BLINK_INLINE Scales read_scales(const uint8_t* block) {
    const float scale = read_half<Isa>(block + 208);
    Scales found;
    for (uint32_t i = 0; i < 16; ++i) found.of_16[i] = scale * float(int8_t(block[192 + i]));
    return found;
  }
  template <class Isa>
  static BLINK_INLINE void decode(const uint8_t* block, const Scales& scales, uint32_t group,
                                  typename Isa::Float* out) {
    const uint32_t half = group / 4, place = group % 4;
    const uint8_t* low = block + half * 64 + place % 2 * 32;
    const uint8_t* high = block + 128 + half * 32;
    for (uint32_t i = 0; i < kVectors<Isa>; ++i) {
      const auto bits = (Isa::widen(low + i * Isa::kLanes) >> int32_t(place / 2 * 4)) & 15;
      const auto more = (Isa::widen(high + i * Isa::kLanes) >> int32_t(place * 2)) & 3;
      out[i] = Isa::to_float((bits | more << 4) - 32) * scales.of_16[group * 2 + i * Isa::kLanes / 16];
    }
  }
};

}  // namespace blink
