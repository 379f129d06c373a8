// SPDX-License-Identifier: Apache-2.0
// csrc/gpu/decode/ptx.cuh for emulated threads, as far as programs here use it. Copies are there at once.
#pragma once

#include "numbers.cuh"

namespace blink {

enum class Output { kStore, kAdd, kGate };

inline void launch_dependents() {}
inline void wait_for_prerequisites() {}

template <int kCount>
void take_registers() {}
template <int kCount>
void give_up_registers() {}

inline int fresh_thread() { return threadIdx.x; }

inline Vec16 load(const void* from) { return *static_cast<const Vec16*>(from); }
inline unsigned load_pair(const Bf16* from) { return *reinterpret_cast<const unsigned*>(from); }
inline unsigned load_pair_from_l2(const Bf16* from) { return load_pair(from); }
inline Bf16 load_from_l2(const Bf16* from) { return *from; }

using Barrier = unsigned long long;

struct Phase {  // what a barrier's bits are
  uint32_t parity : 1, expected : 15, missing : 16;
  int32_t bytes;

  void end_if_complete() {
    if (missing == 0 && bytes == 0) parity ^= 1, missing = expected;
  }
};
static_assert(sizeof(Phase) == sizeof(Barrier));

template <class Change>
void change(Barrier& barrier, Change make) {
  Phase phase;
  std::memcpy(&phase, &barrier, sizeof phase);
  make(phase);
  phase.end_if_complete();
  std::memcpy(&barrier, &phase, sizeof phase);
}

inline void initialize(Barrier& barrier, unsigned arrivals) {
  const Phase phase = {0, arrivals, arrivals, 0};
  std::memcpy(&barrier, &phase, sizeof phase);
}
inline void publish_barriers() {}
inline void fence_shared_writes() {}

inline void arrive(Barrier& barrier) {
  change(barrier, [](Phase& phase) {
    if (phase.missing == 0) emulated::fail("arrived once too often");
    phase.missing--;
  });
}

inline void wait(Barrier& barrier, unsigned parity) {
  for (;; emulated::yield()) {
    Phase phase;
    std::memcpy(&phase, &barrier, sizeof phase);
    if (phase.parity != parity) return;
  }
}

inline void expect(Barrier& barrier, unsigned bytes) {
  change(barrier, [=](Phase& phase) { phase.missing--, phase.bytes += int(bytes); });
}

inline void complete(Barrier& barrier, unsigned bytes) {
  change(barrier, [=](Phase& phase) {
    phase.bytes -= int(bytes);
    if (phase.bytes < 0) emulated::fail("more bytes than expected");
  });
}

inline void copy(void* to, const void* from, unsigned bytes, Barrier& barrier) {
  if ((uintptr_t(to) | uintptr_t(from) | bytes) % 16) emulated::fail("a copy of what is not aligned");
  std::memcpy(to, from, bytes);
  complete(barrier, bytes);
}
inline void copy_once(void* to, const void* from, unsigned bytes, Barrier& barrier) { copy(to, from, bytes, barrier); }

template <int kBytes>
void start_copy(void* to, const void* from) {
  std::memcpy(to, from, kBytes);
}
inline void wait_for_copies() {}

template <int kWarps>
void sync_warps() {
  emulated::meet(emulated::current->own->some, 32 * kWarps);
}

inline void prefetch_line(const void*) {}
inline void prefetch_bytes(const void* from, unsigned bytes) {  // a sanitizer sees what is not there
  static volatile char read;
  read = *static_cast<const char*>(from), read = *(static_cast<const char*>(from) + bytes - 1);
}

inline Vec16 load_transposed(const void* row) {
  const auto& rows = emulated::show<1>({uint64_t(row)});
  const auto number = [&](int row, int column) {
    return unsigned(reinterpret_cast<const unsigned short*>(rows[row][0])[column]);
  };
  unsigned words[4];
  const int lane = emulated::lane();
  for (int i = 0; i < 4; i++)
    words[i] = number(i * 8 + lane % 4 * 2, lane / 4) | number(i * 8 + lane % 4 * 2 + 1, lane / 4) << 16;
  return {words[0], words[1], words[2], words[3]};
}

// Without clusters.
inline unsigned cluster_rank() { return 0; }
inline void cluster_arrive_relaxed() {}
inline void cluster_wait() {}
template <int kCluster, class T>
void send(int, T value, T& place, Barrier&) {
  place = value;
}
template <int kCluster>
void receive(Barrier&) {
  __syncthreads();
}

using Word = unsigned long long;
inline void store_word(Word* to, Word word) { *to = word; }
inline void store_words(Word* to, Word first, Word second) {
  if (uintptr_t(to) % 16) emulated::fail("words that are not aligned");
  to[0] = first, to[1] = second;
}
inline unsigned load_count(const unsigned* from) {
  emulated::yield();
  return *from;
}
inline void add_one(unsigned* to) { ++*to; }
inline void load_words(const Word* from, Word (&words)[1]) {
  emulated::yield();
  words[0] = from[0];
}
inline void load_words(const Word* from, Word (&words)[2]) {
  if (uintptr_t(from) % 16) emulated::fail("words that are not aligned");
  emulated::yield();
  words[0] = from[0], words[1] = from[1];
}

}  // namespace blink
