// SPDX-License-Identifier: Apache-2.0
// Copies of boxes of tensors to shared memory.
#pragma once

#include "kernels/args.h"
#include "kernels/common/ptx.cuh"

namespace blink {

// Rows of a box hold 64 elements in shared memory, 128 bytes: 16-byte chunk c of row r is at place c ^ r % 8. Boxes
// start at multiples of 1,024 bytes.
constexpr int kBoxRow = 64;

__device__ inline void prefetch_map(const TensorMap& map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

// How L2 shall treat what is copied: the first to go, or the last.
__device__ inline unsigned long long read_once_policy() {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ inline unsigned long long read_often_policy() {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copy the map's box at a column and row; what lies outside of the tensor becomes zeros and counts as copied.
__device__ inline void copy_box(void* to, const TensorMap& map, int column, int row, Barrier& barrier,
                                unsigned long long policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
#endif
}

// The same to all blocks of the cluster whose bits are set, at the same place of their shared memory, counted by the
// same barrier of each.
__device__ inline void copy_box_to_all(void* to, const TensorMap& map, int column, int row, Barrier& barrier,
                                       unsigned short blocks, unsigned long long policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_"
      "hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(shared_address(to)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(&barrier)), "h"(blocks), "l"(policy)
      : "memory");
#endif
}

// Copy a box of three dimensions to this block, at a column and a row.
__device__ inline void copy_box_3d(void* to, const TensorMap& map, int column, int row, Barrier& barrier,
                                   unsigned long long policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3, %4}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(&map), "r"(column), "r"(row), "r"(0), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
#endif
}

// The same of four dimensions, at places of all but the first.
__device__ inline void copy_box_4d(void* to, const TensorMap& map, int second, int third, int fourth, Barrier& barrier,
                                   unsigned long long policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3, %4, %5}], [%6], %7;" ::"r"(shared_address(to)),
      "l"(&map), "r"(0), "r"(second), "r"(third), "r"(fourth), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
#endif
}

// The same of five dimensions, at places of the second and fourth.
__device__ inline void copy_box_5d(void* to, const TensorMap& map, int second, int fourth, Barrier& barrier,
                                   unsigned long long policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3, %2, %4, %2}], [%5], %6;" ::"r"(shared_address(to)),
      "l"(&map), "r"(0), "r"(second), "r"(fourth), "r"(shared_address(&barrier)), "l"(policy)
      : "memory");
#endif
}

}  // namespace blink
