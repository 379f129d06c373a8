// SPDX-License-Identifier: Apache-2.0
// The instructions of prompts' attention that CUDA C++ has no words for. tests/native/gpu_warpgroups.h has them for the
// host.
#pragma once

#include "kernels/common/wgmma.cuh"

namespace blink {

// Copy a box of five dimensions, at places of all but the first two.
__device__ inline void copy_box_5d(void* to, const TensorMap& map, int third, int fourth, int fifth, Barrier& barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %3, %4, "
      "%5}], [%6];" ::"r"(shared_address(to)),
      "l"(&map), "r"(0), "r"(third), "r"(fourth), "r"(fifth), "r"(shared_address(&barrier))
      : "memory");
#endif
}

// Count a part of a tile that all threads have left; return how many were there.
__device__ inline int count_part(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Wait for the multiplying threads, or for those of one warpgroup.
__device__ inline void sync_multiplying() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
__device__ inline void sync_warpgroup(int group) { asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory"); }

// Two warpgroups take turns: each waits for its own, and then gives the other one's.
__device__ inline void wait_for_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(4 + group) : "memory"); }
__device__ inline void give_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(4 + group) : "memory"); }

// Have a sum of exponentials, which is never negative, computed before what follows: a compiler that may wait for
// products first, and compute then, does.
__device__ inline void compute_before(float total, int& never) {
  asm volatile(
      "{\n .reg .pred below;\n setp.lt.f32 below, %0, 0f00000000;\n @below st.shared.u32 [%1], 0;\n}" ::"f"(total),
      "r"(shared_address(&never))
      : "memory");
}

// A warpgroup's threads keep fewer registers, or get more of what others have left.
template <int kCount>
__device__ inline void give_registers() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

template <int kCount>
__device__ inline void take_registers() {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

// scores = 64 queries times 128 keys over 16 dims; kAdd: added to what is there. Lanes hold sums as multiply_boxes()
// has them.
template <bool kAdd>
__device__ inline void multiply_keys(float (&d)[64], unsigned long long queries, unsigned long long keys) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n .reg .pred add;\n setp.eq.u32 add, %66, 1;\n wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{" BLINK_NAMES_64 "}, %64, %65, add, 1, 1, 0, 0;\n}"
      : BLINK_SUMS_64(0)
      : "l"(queries), "l"(keys), "n"(int(kAdd)));
#endif
}

// Add the products of 64 queries' weights of 16 keys, as a lane's scores are, with 128 or 256 dims of these keys'
// values.
__device__ inline void add_values(float (&d)[64], const unsigned* weights, unsigned long long values) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n .reg .pred add;\n setp.eq.u32 add, 1, 1;\n wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{" BLINK_NAMES_64 "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}"
      : BLINK_SUMS_64(0)
      : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(values));
#endif
}

__device__ inline void add_values(float (&d)[128], const unsigned* weights, unsigned long long values) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n .reg .pred add;\n setp.eq.u32 add, 1, 1;\n wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{" BLINK_NAMES_128 "}, {%128, %129, %130, %131}, %132, add, 1, 1, 1;\n}"
      : BLINK_SUMS_128(0)
      : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(values));
#endif
}

}  // namespace blink
