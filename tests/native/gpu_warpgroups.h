// SPDX-License-Identifier: Apache-2.0
// Hopper's bulk copies, barriers and warpgroup MMAs (wgmma) on the host's threads, for one block at a time: the words
// of csrc/kernels/prefill/warpgroups.cuh, and of what that includes. Copies and products are done when they are begun.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>

#include "gpu_threads.h"
#include "kernels/args.h"

#define __grid_constant__

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
using std::fmaxf;

inline void __syncwarp() { block->warps[threadIdx.x / 32]->arrive_and_wait(); }

namespace blink {

struct Vec16 {
  unsigned x, y, z, w;
};
inline Vec16 load(const void* from) {
  Vec16 value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}
inline unsigned load_word(const void* from) { return *static_cast<const unsigned*>(from); }
inline float4 load_from_l2(const float4* from) { return *from; }
inline float load_from_l2(const float* from) { return *from; }
inline int count_part(int* counter) { return std::atomic_ref<int>(*counter).fetch_add(1); }

inline unsigned round_to_bf16(float value) {
  if (value != value) return 0x7fc0;
  const unsigned bits = __float_as_uint(value);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline unsigned to_bf16_pair(float low, float high) { return round_to_bf16(low) | round_to_bf16(high) << 16; }

// Barriers of the block.
struct Phase {
  int arrivals, left;
  long bytes;
  unsigned number;
};
using Barrier = unsigned long long;
inline std::mutex phases_mutex;
inline std::condition_variable phase_ended;
inline std::map<const Barrier*, Phase> phases;

inline void change_phase(const Barrier& barrier, int arrivals, long bytes) {
  const std::lock_guard lock(phases_mutex);
  Phase& phase = phases.at(&barrier);
  phase.left -= arrivals, phase.bytes += bytes;
  if (phase.left < 0) std::abort();
  if (phase.left > 0 || phase.bytes != 0) return;
  phase.left = phase.arrivals, phase.number++;
  phase_ended.notify_all();
}
inline void initialize(Barrier& barrier, unsigned arrivals) {
  const std::lock_guard lock(phases_mutex);
  phases[&barrier] = {int(arrivals), int(arrivals), 0, 0};
}
inline void arrive(Barrier& barrier) { change_phase(barrier, 1, 0); }
inline void expect(Barrier& barrier, unsigned bytes) { change_phase(barrier, 1, bytes); }
inline void wait(Barrier& barrier, unsigned parity) {
  std::unique_lock lock(phases_mutex);
  phase_ended.wait(lock, [&] { return phases.at(&barrier).number % 2 != parity; });
}
inline void publish_barriers() {}
inline void publish_stores() {}

inline std::unique_ptr<std::barrier<>> multiplying[2], warpgroups[2], turns[2];  // the first: of each block
inline void sync_multiplying() { multiplying[block_rank]->arrive_and_wait(); }
inline void sync_warpgroup(int group) { warpgroups[group]->arrive_and_wait(); }
inline void wait_for_turn(int group) { turns[group]->arrive_and_wait(); }
inline void give_turn(int group) { static_cast<void>(turns[group]->arrive()); }
template <int>
inline void give_registers() {}
template <int>
inline void take_registers() {}

// Shared memory by addresses, and in boxes: of each 1,024 bytes, chunk c of row r is at place c ^ r.
inline unsigned shared_address(const void* p) { return unsigned(static_cast<const char*>(p) - block->shared()); }
inline char* in_box(unsigned address) { return block->shared() + (address ^ (address >> 7 & 7) << 4); }

struct Boxes {  // what a TensorMap holds here: boxes whose first size is 128 bytes
  const char* base;
  long strides[4];            // elements, of all dimensions but the first
  int box[4];                 // sizes
  int rows = 0, element = 2;  // of matrices; bytes

  operator TensorMap() const {
    static_assert(sizeof(Boxes) <= sizeof(TensorMap));
    TensorMap map{};
    std::memcpy(&map, this, sizeof(Boxes));
    return map;
  }
};
inline const Boxes& boxes_of(const TensorMap& map) { return reinterpret_cast<const Boxes&>(map); }
inline void prefetch_map(const TensorMap&) {}
inline void copy_box_5d(void* to, const TensorMap& described, int third, int fourth, int fifth, Barrier& barrier) {
  const Boxes& map = boxes_of(described);
  const int first[4] = {0, third, fourth, fifth}, rows = map.box[0] * map.box[1] * map.box[2] * map.box[3];
  for (int row = 0; row < rows; row++) {
    long at = 0;
    for (int i = 0, left = row; i < 4; left /= map.box[i], i++) at += (first[i] + left % map.box[i]) * map.strides[i];
    for (int chunk = 0; chunk < 8; chunk++)
      std::memcpy(in_box(shared_address(to) + row * 128 + chunk * 16), map.base + 2 * at + chunk * 16, 16);
  }
  change_phase(barrier, 0, -128l * rows);
}

// Operands by descriptors: what lies where, by PTX's canonical layouts of 128 bytes.
inline unsigned long long describe_box(const void* box) { return shared_address(box) >> 4 | 1ull << 16 | 64ull << 32; }
inline float read_bf16(unsigned address) {
  return __uint_as_float(*reinterpret_cast<const unsigned short*>(in_box(address)) << 16);
}
struct Operand {
  explicit Operand(unsigned long long descriptor)
      : start((descriptor & 0x3fff) << 4),
        leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4) {}
  // Of a row of neighbours in k, and of neighbours in a k.
  float by_k(int n, int k) const { return read_bf16(start + n / 8 * stride + n % 8 * 128 + k * 2); }
  float by_n(int n, int k) const {
    return read_bf16(start + n / 64 * leading + n % 64 * 2 + k / 8 * stride + k % 8 * 128);
  }
  unsigned start, leading, stride;
};
inline void fence_wgmma() {}
inline void commit_wgmma() {}
template <int>
inline void wait_for_wgmma() {  // which all lanes of a warp do at once: one arrives at barriers for all
  __syncwarp();
}
template <int kCount>
inline void keep(float (&)[kCount]) {}
inline void compute_before(float, int&) {}

// Where a thread's i-th sum stands.
inline int row_of(int i) { return threadIdx.x / 32 % 4 * 16 + i / 2 % 2 * 8 + threadIdx.x % 32 / 4; }
inline int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

template <bool kAdd>
inline void multiply_keys(float (&d)[64], unsigned long long queries, unsigned long long keys) {
  for (int i = 0; i < 64; i++) {
    float sum = kAdd ? d[i] : 0;
    for (int k = 0; k < 16; k++) sum += Operand(queries).by_k(row_of(i), k) * Operand(keys).by_k(column_of(i), k);
    d[i] = sum;
  }
}
template <int kCount>
inline void multiply_boxes(float (&d)[kCount], unsigned long long a, unsigned long long b) {
  for (int i = 0; i < kCount; i++)
    for (int k = 0; k < 16; k++) d[i] += Operand(a).by_k(row_of(i), k) * Operand(b).by_k(column_of(i), k);
}

// Add the products of a lane's registers, 16 k of two rows, with those of columns.
template <int kCount, class Columns>
inline void multiply_registers(float (&d)[kCount], const unsigned* a, Columns columns) {
  float own[2][16];
  for (unsigned lane = 0; lane < 4; lane++)
    for (int word = 0; word < 4; word++) {
      const unsigned pair = exchange(a[word], threadIdx.x % 32 / 4 * 4 + lane);
      float* to = own[word % 2] + word / 2 * 8 + lane * 2;
      to[0] = low_float(pair), to[1] = high_float(pair);
    }
  for (int i = 0; i < kCount; i++)
    for (int k = 0; k < 16; k++) d[i] += own[i / 2 % 2][k] * columns(column_of(i), k);
}
template <int kCount>
inline void add_values(float (&d)[kCount], const unsigned* weights, unsigned long long values) {
  multiply_registers(d, weights, [&](int column, int k) { return Operand(values).by_n(column, k); });
}

}  // namespace blink
