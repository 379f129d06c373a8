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

template <int kCount>
__device__ inline bool have_tag(const Word (&words)[kCount], unsigned tag) {
  bool have = true;
#pragma unroll
  for (const Word word : words) have &= unsigned(word >> 32) == tag;
  return have;
}

// Load words. place: where the i-th ones are.
template <int kLoads, int kCount, class Place>
__device__ inline void load_all(Word (&words)[kLoads][kCount], Place place) {
#pragma unroll
  for (int i = 0; i < kLoads; i++) load_words(place(i), words[i]);
}

// Load once more, all at once, those of the loaded words that do not have their tag, until all have it. A step that
// goes wrong ends.
template <int kLoads, int kCount, class Place>
__device__ inline void await_loaded(Word (&words)[kLoads][kCount], unsigned tag, Place place) {
  for (unsigned spins = 0;; spins++) {
    bool there = true;
#pragma unroll
    for (int i = 0; i < kLoads; i++) there &= have_tag(words[i], tag);
    if (there) return;
    if (spins == kMostSpins) __trap();
#pragma unroll
    for (int i = 0; i < kLoads; i++)
      if (!have_tag(words[i], tag)) load_words(place(i), words[i]);
  }
}

template <int kLoads, int kCount, class Place>
__device__ inline void await_words(Word (&words)[kLoads][kCount], unsigned tag, Place place) {
  load_all(words, place);
  await_loaded(words, tag, place);
}

// What is kept of hand-overs from one step to the next.
struct Handovers {
  unsigned count;  // of all before this step
  unsigned given;  // by how many blocks, of all so far
};

// Hand-overs of words from all blocks to all.
struct Handover {
  Handovers& all;
  unsigned count;  // so far; also the tag of the last one's words

  __device__ explicit Handover(Handovers* all) : all(*all), count(reinterpret_cast<volatile Handovers*>(all)->count) {}

  // The tag of what is given before this hand-over is finished.
  __device__ unsigned next_tag() const { return count + 1; }

  // Say that this block has given its words.
  __device__ void finish() {
    if (threadIdx.x == 0) add_one(&all.given);
    count++;
  }

  // Wait until about all blocks have. It spares the memory looks at words that are not there yet, by all threads of all
  // blocks; that a word is there, it does not mean.
  template <int kWarps>
  __device__ void await() const {
    if (threadIdx.x == 0)
      for (unsigned spins = 0; spins < kMostSpins && int(load_count(&all.given) - count * gridDim.x) < 0; spins++) {
      }
    sync_warps<kWarps>();
  }
};

}  // namespace blink
