// SPDX-License-Identifier: Apache-2.0
// A block's part of a row of logits, as the model made them: where they are, or in the block's shared memory.
#pragma once

#include "kernels/common/ptx.cuh"
#include "sampler/penalties.h"

namespace blink {

struct Half {
  unsigned short bits;
};

// Four numbers as the model makes them.
template <class T>
struct alignas(4 * sizeof(T)) Raw {
  unsigned words[sizeof(T)];
};
__device__ inline Quad to_quad(const Raw<float>& raw) {
  return {{__uint_as_float(raw.words[0]), __uint_as_float(raw.words[1]), __uint_as_float(raw.words[2]),
           __uint_as_float(raw.words[3])}};
}
__device__ inline Quad to_quad(const Raw<Bf16>& raw) {
  return {{low_float(raw.words[0]), high_float(raw.words[0]), low_float(raw.words[1]), high_float(raw.words[1])}};
}
__device__ inline Quad to_quad(const Raw<Half>& raw) {
  return {{low_half(raw.words[0]), low_half(raw.words[0] >> 16), low_half(raw.words[1]), low_half(raw.words[1] >> 16)}};
}

__device__ inline float to_float(Half value) { return low_half(value.bits); }
__device__ inline float to_float(float value) { return value; }

template <class T>
constexpr unsigned kMinusInfinity = 0;  // its bits
template <>
inline constexpr unsigned kMinusInfinity<Bf16> = 0xff80;
template <>
inline constexpr unsigned kMinusInfinity<Half> = 0xfc00;

// Four numbers of a row, one by one; -inf from its end on.
__device__ inline Raw<float> gather(const float* row, uint32_t first, uint32_t size) {
  Raw<float> raw;
  BLINK_UNROLLED
  for (uint32_t j = 0; j < 4; j++) raw.words[j] = __float_as_uint(first + j < size ? row[first + j] : -kInfinity);
  return raw;
}
template <class T>
__device__ inline Raw<T> gather(const T* row, uint32_t first, uint32_t size) {
  Raw<T> raw{};
  BLINK_UNROLLED
  for (uint32_t j = 0; j < 4; j++)
    raw.words[j / 2] |= (first + j < size ? row[first + j].bits : kMinusInfinity<T>) << j % 2 * 16;
  return raw;
}

// kIsAligned: all rows can be read four logits at a time.
template <class T, bool kIsStaged, bool kIsAligned>
struct RowPart {
  uint32_t first, count;  // in quads

  // staged: shared memory for the part.
  template <class Group>
  __device__ RowPart(const Group& group, const T* row, uint32_t vocab_size, T* staged)
      : row_(row), vocab_size_(vocab_size), staged_(reinterpret_cast<Raw<T>*>(staged)) {
    share_out(group, (vocab_size + 3) / 4, first, count);
    if constexpr (kIsStaged) {  // each thread copies what it will read
#pragma unroll 4
      for (uint32_t i = group.thread(); i < count; i += Group::kThreads) staged_[i] = fetch(i);
    }
  }

  __device__ Quad load(uint32_t i) const { return to_quad(kIsStaged ? staged_[i] : fetch(i)); }
  __device__ ChangedPart<RowPart> with(const Changes* changes) const { return {*this, changes}; }
  __device__ float logit(uint32_t place) const { return logit_of(first * 4 + place); }
  __device__ float logit_of(uint32_t token) const { return to_float(row_[token]); }
  __device__ uint32_t num_logits() const { return least(count * 4, vocab_size_ - first * 4); }

 private:
  __device__ Raw<T> fetch(uint32_t i) const {
    if constexpr (kIsAligned) return reinterpret_cast<const Raw<T>*>(row_)[first + i];
    return gather(row_, (first + i) * 4, vocab_size_);
  }

  const T* row_;
  const uint32_t vocab_size_;
  Raw<T>* staged_;
};

}  // namespace blink
