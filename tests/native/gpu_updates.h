// SPDX-License-Identifier: Apache-2.0
// What GEMMs with updates take beside gpu_matrices.h's words: those of decoding GEMMs, and of clusters that exchange
// sums. A kernel sees what others write when it has waited for it, and not before.
#pragma once

#include <functional>

#include "gpu_matrices.h"
#include "kernels/formats.h"

#define __shared__
#define __align__(bytes)

inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline float rsqrtf(float value) { return 1 / std::sqrt(value); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline unsigned __ballot_sync(unsigned, bool holds) {
  std::barrier<>& warp = *block->warps[threadIdx.x / 32];
  block->lanes[threadIdx.x] = holds;
  warp.arrive_and_wait();
  unsigned found = 0;
  for (int lane = 0; lane < 32; lane++) found |= block->lanes[threadIdx.x / 32 * 32 + lane] << lane;
  warp.arrive_and_wait();
  return found;
}

namespace blink {

enum class Output { kStore, kAdd, kGate };

inline Bf16 to_bf16(float value) { return {static_cast<unsigned short>(round_to_bf16(value))}; }
template <FormatId>
void write_columns(void*, long, long, int, unsigned);  // of kernels that are not run here
inline void let_copies_see() {}

// What becomes visible, once: when the kernel in front has ended, and when its successor says that one before it has.
struct Sight {
  std::once_flag once;
  std::function<void()> show;

  void open() {
    std::call_once(once, [this] {
      if (show) show();
    });
  }
};
inline std::unique_ptr<Sight> ended, begun;
inline void see_ended() { ended->open(); }
#define wait_for_prerequisites see_ended
inline unsigned load_acquire(const unsigned* from) {
  begun->open();
  return *from;
}
inline void store_release(unsigned* to, unsigned word) { *to = word; }

// Sums of products over 16 k, where PTX has a warp's operands of mma.m16n8k16.
inline unsigned operands[8][512][6];  // of each block's threads
inline void multiply_add(float (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                         unsigned b1) {
  std::barrier<>& warp = *block->warps[threadIdx.x / 32];
  auto& of_block = operands[block_rank];
  const unsigned own[6] = {a0, a1, a2, a3, b0, b1}, first = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  std::memcpy(of_block[threadIdx.x], own, sizeof(own));
  warp.arrive_and_wait();
  const auto half = [](unsigned pair, int which) { return which ? high_float(pair) : low_float(pair); };
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++) {
      const unsigned in_row = k % 8 / 2, column = lane % 4 * 2 + i % 2;
      const unsigned a = of_block[first + lane / 4 * 4 + in_row][k / 8 * 2 + i / 2];
      const unsigned b = of_block[first + column * 4 + in_row][4 + k / 8];
      sums[i] += half(a, k % 2) * half(b, k % 2);
    }
  warp.arrive_and_wait();
}

inline void store_counted(unsigned address, unsigned barrier, float4 values) {
  store_in_cluster(address, values);
  change_phase(find_in_cluster<Barrier>(barrier), 0, -long(sizeof(values)));
}
template <int kCluster, class T>
inline void send(int to, T value, T& place, Barrier& counter) {
  if constexpr (kCluster > 1)
    store_counted(address_in(to, &place), address_in(to, &counter), value);
  else
    place = value;
}

}  // namespace blink
