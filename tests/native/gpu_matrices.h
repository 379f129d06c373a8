// SPDX-License-Identifier: Apache-2.0
// What products of matrices take beside gpu_warpgroups.h's words: boxes of rows, operands in registers, and results
// that are stored transposed.
#pragma once

#include "gpu_warpgroups.h"

inline Index gridDim;

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) result |= unsigned(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}

namespace blink {

constexpr int kBoxRow = 64;

inline void to_words(Vec16 v, unsigned* words) { std::memcpy(words, &v, sizeof(v)); }
inline unsigned fma_pairs(unsigned a, unsigned b, unsigned c) {
  const auto sum = [](float x, float y, float z) { return float(double(x) * y + z); };
  return to_bf16_pair(sum(low_float(a), low_float(b), low_float(c)), sum(high_float(a), high_float(b), high_float(c)));
}
inline unsigned multiply_pairs(unsigned a, unsigned b) { return fma_pairs(a, b, 0x80008000u); }
inline void keep(unsigned (&)[4]) {}
unsigned fma_halves(unsigned, unsigned, unsigned), to_half_pair(float, float);  // of kernels that are not run here
void to_half_pairs(unsigned, unsigned&, unsigned&);

inline unsigned long long read_once_policy() { return 0; }
inline unsigned long long read_often_policy() { return 0; }
template <int kBytes>
inline void start_copy(void* to, const void* from) {
  std::memcpy(to, from, kBytes);
}
inline void wait_for_copies() {}

// Copy a box of some matrices, as many as its second size. Rows behind the last are zeros.
inline void copy_boxes(void* to, const Boxes& map, int column, int row, Barrier& barrier, int matrices) {
  for (int i = 0; i < matrices * map.box[0]; i++)
    for (int chunk = 0; chunk < 8; chunk++) {
      const int matrix = i / map.box[0], in_matrix = row + i % map.box[0];
      const long at = matrix * map.strides[1] + in_matrix * map.strides[0] + column;
      char* place = in_box(shared_address(to) + i * 128 + chunk * 16);
      if (in_matrix < map.rows)
        std::memcpy(place, map.base + at * map.element + chunk * 16, 16);
      else
        std::memset(place, 0, 16);
    }
  change_phase(barrier, 0, -128l * matrices * map.box[0]);
}
inline void copy_box(void* to, const TensorMap& map, int column, int row, Barrier& barrier, unsigned long long) {
  copy_boxes(to, boxes_of(map), column, row, barrier, 1);
}
inline void copy_box_3d(void* to, const TensorMap& map, int column, int row, Barrier& barrier, unsigned long long) {
  copy_boxes(to, boxes_of(map), column, row, barrier, boxes_of(map).box[1]);
}
inline void copy_box_to_all(void* to, const TensorMap& map, int column, int row, Barrier& barrier,
                            unsigned short blocks, unsigned long long policy) {
  Block* own = block;
  const long place = static_cast<char*>(to) - own->shared();
  const long counter = reinterpret_cast<char*>(&barrier) - own->shared();
  for (unsigned rank = 0; rank < cluster.blocks.size(); rank++) {
    if (!(blocks >> rank & 1)) continue;
    block = cluster.blocks[rank].get();
    copy_box(block->shared() + place, map, column, row, *reinterpret_cast<Barrier*>(block->shared() + counter), policy);
  }
  block = own;
}
inline void arrive_in_cluster(unsigned barrier) { arrive(find_in_cluster<Barrier>(barrier)); }

template <int kCount>
inline void multiply_rows(float (&d)[kCount], const unsigned (&a)[4], unsigned long long b) {
  multiply_registers(d, a, [&](int column, int k) { return Operand(b).by_k(column, k); });
}

inline void store_transposed(void* column, unsigned first, unsigned second) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned long long own = reinterpret_cast<unsigned long long>(column);
  for (unsigned matrix = 0; matrix < 2; matrix++)
    for (unsigned half = 0; half < 2; half++) {
      const unsigned from = matrix * 8 + lane % 4 * 2 + half;
      const unsigned low = exchange(unsigned(own), from), high = exchange(unsigned(own >> 32), from);
      auto* to = reinterpret_cast<unsigned short*>(static_cast<unsigned long long>(high) << 32 | low);
      to[lane / 4] = static_cast<unsigned short>((matrix ? second : first) >> 16 * half);
    }
}

}  // namespace blink
