// SPDX-License-Identifier: Apache-2.0
// The only file that knows the compiler: integer types, the function markers and the ordered accesses to shared words.
// BLINK_RARE_FN is for what stays one piece of code that all callers call. A step's end finds the instruction caches
// filled by the model, so what is copied into every caller is fetched anew for each.
#pragma once

#if defined(__CUDACC_RTC__)
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using size_t = decltype(sizeof(0));
#define BLINK_FN __device__ inline
#define BLINK_RARE_FN __device__ __noinline__
#else
#include <atomic>
#include <cstddef>
#include <cstdint>
#define BLINK_FN inline
#define BLINK_RARE_FN inline __attribute__((noinline))
#endif

namespace blink {

// A word through which memory is copied, whatever type others read and write it as: compilers take two pointers to
// different types for pointers to different memory. Pointers to it are declared by this name: `auto` is a plain word.
#if defined(__CUDACC_RTC__)
using Word = uint32_t;  // no compiler for GPUs moves an access over the barrier that stands between those of two lanes
#else
using Word [[gnu::may_alias]] = uint32_t;
#endif

// Words of the region have one writer and many readers on other chips, so their scope is the whole system.
#if defined(__CUDACC_RTC__)
BLINK_FN uint32_t load_acquire(const uint32_t& word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(&word) : "memory");
  return value;
}
BLINK_FN uint64_t load_acquire(const uint64_t& word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(value) : "l"(&word) : "memory");
  return value;
}
// Four words side by side, in one access: where they are far away, one after the other would take four times as long.
BLINK_FN void load_acquire(const uint32_t* words, uint32_t (&values)[4]) {
  asm volatile("ld.acquire.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "l"(words)
               : "memory");
}
BLINK_FN void store_release(uint32_t& word, uint32_t value) {
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(&word), "r"(value) : "memory");
}
BLINK_FN void store_release(uint64_t& word, uint64_t value) {
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(&word), "l"(value) : "memory");
}
BLINK_FN uint32_t load_relaxed(const uint32_t& word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(value) : "l"(&word) : "memory");
  return value;
}
BLINK_FN void store_relaxed(uint32_t& word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(&word), "r"(value) : "memory");
}
BLINK_FN void store_relaxed(uint64_t& word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(&word), "l"(value) : "memory");
}
#else
template <class T>
BLINK_FN T load_acquire(const T& word) {
  return std::atomic_ref<T>(const_cast<T&>(word)).load(std::memory_order_acquire);
}
BLINK_FN void load_acquire(const uint32_t* words, uint32_t (&values)[4]) {
  for (uint32_t i = 0; i < 4; i++) values[i] = load_acquire(words[i]);
}
template <class T>
BLINK_FN void store_release(T& word, T value) {
  std::atomic_ref<T>(word).store(value, std::memory_order_release);
}
template <class T>
BLINK_FN T load_relaxed(const T& word) {
  return std::atomic_ref<T>(const_cast<T&>(word)).load(std::memory_order_relaxed);
}
template <class T>
BLINK_FN void store_relaxed(T& word, T value) {
  std::atomic_ref<T>(word).store(value, std::memory_order_relaxed);
}
#endif

template <class T>
BLINK_FN T least(T a, T b) {
  return b < a ? b : a;
}
template <class T>
BLINK_FN T most(T a, T b) {
  return a < b ? b : a;
}
BLINK_FN uint32_t ceil_div(uint32_t a, uint32_t b) { return a / b + (a % b != 0); }

}  // namespace blink
