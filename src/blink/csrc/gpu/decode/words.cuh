// SPDX-License-Identifier: Apache-2.0
// Words by which blocks hand over, without a fence: a tag says that the rest is there (NCCL's protocol LL).
#pragma once

#include "ptx.cuh"

namespace blink {

constexpr unsigned kMostSpins = 1 << 24;

__device__ inline Word tagged(unsigned value, unsigned tag) { return Word(tag) << 32 | value; }

__device__ inline void give(Word* to, unsigned value, unsigned tag) { store_word(to, tagged(value, tag)); }

__device__ inline void give_pair(Word* to, unsigned low, unsigned high, unsigned tag) {
  store_words(to, tagged(low, tag), tagged(high, tag));
}

// Wait until words have their tag. A step that goes wrong ends.
template <int kCount>
__device__ inline void await_words(const Word* from, unsigned tag, Word (&words)[kCount]) {
  for (unsigned spins = 0;; spins++) {
    bool there = true;
#pragma unroll
    for (const Word word : words) there &= unsigned(word >> 32) == tag;
    if (there) return;
    if (spins == kMostSpins) __trap();
    load_words(from, words);
  }
}

}  // namespace blink
