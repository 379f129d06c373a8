// SPDX-License-Identifier: Apache-2.0
// Numbers of 8 bytes that ranks exchange, in each type, and their sums.
#pragma once

#include "kernels/comm/words.cuh"
#include "kernels/common/ptx.cuh"

namespace blink {

struct F16 {
  unsigned short bits;
};

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(F16 value) { return float_of_half(value.bits); }

template <class T>
__device__ inline T round_to(float value);
template <>
__device__ inline float round_to<float>(float value) {
  return value;
}
template <>
__device__ inline Bf16 round_to<Bf16>(float value) {
  return to_bf16(value);
}
template <>
__device__ inline F16 round_to<F16>(float value) {
  return {half_of_float(value)};
}

// The numbers of one line.
template <class T>
union Pack {
  static constexpr int kCount = 8 / sizeof(T);
  uint2 data;
  T values[kCount];
};

// Numbers of a matrix from `at` on, of which there are `count`; 0 beyond its end.
template <class T>
__device__ inline Pack<T> load_pack(const void* from, long at, long count) {
  Pack<T> pack;
  pack.data = make_uint2(0, 0);
  const T* values = static_cast<const T*>(from) + at;
  if (at % Pack<T>::kCount == 0 && at + Pack<T>::kCount <= count) {
    pack.data = *reinterpret_cast<const uint2*>(values);
  } else {
#pragma unroll
    for (int i = 0; i < Pack<T>::kCount; i++)
      if (at + i < count) pack.values[i] = values[i];
  }
  return pack;
}

template <class T>
__device__ inline void store_pack(void* to, long at, long count, Pack<T> pack) {
  T* values = static_cast<T*>(to) + at;
  if (at % Pack<T>::kCount == 0 && at + Pack<T>::kCount <= count) {
    *reinterpret_cast<uint2*>(values) = pack.data;
  } else {
#pragma unroll
    for (int i = 0; i < Pack<T>::kCount; i++)
      if (at + i < count) values[i] = pack.values[i];
  }
}

template <class T>
__device__ inline Pack<T> add(Pack<T> a, Pack<T> b) {
#pragma unroll
  for (int i = 0; i < Pack<T>::kCount; i++) a.values[i] = round_to<T>(to_float(a.values[i]) + to_float(b.values[i]));
  return a;
}

}  // namespace blink
