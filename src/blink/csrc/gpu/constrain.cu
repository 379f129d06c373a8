// SPDX-License-Identifier: Apache-2.0
// The tokens that each row's automaton allows next: a walk over the bytes of every token of the vocabulary, from where
// the row's text stands. Needs nothing of the step's model, so it runs beside the kernel before it.
#include "automaton/walk.h"
#include "scheduler/state.h"

namespace blink {

constexpr uint32_t kConstrainThreads = 256;
constexpr uint32_t kConstrainWarps = kConstrainThreads / 32;
constexpr uint32_t kWordsPerWarp = 32;  // a lane keeps each until the memory for it is free

struct ConstrainArgs {
  const BatchHeader* header;
  const int32_t* row_slots;
  const int32_t* context_lens;
  const SlotParams* params;
  const int32_t* tokens;
  const int32_t* stop_tokens;
  const uint8_t* automata;
  AutomatonPlace* places;
  const uint32_t* token_starts;
  const uint8_t* token_text;
  uint32_t* allowed;  // [rows, words], a bit for each token
  int32_t* may_end;   // [rows]
  uint32_t max_model_len, vocab_size, words;
};

// What was read or written before by other kernels is free from here on.
__device__ inline void wait_for_others() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Which of a word's 32 tokens stop the text.
__device__ inline uint32_t stops_of(const int32_t* stops, uint32_t count, uint32_t word) {
  uint32_t found = 0;
  for (uint32_t i = 0; i < count; i++)
    if (uint32_t(stops[i]) / 32 == word) found |= 1u << stops[i] % 32;
  return found;
}

// The words of a warp, each in the lane of its number.
__device__ inline uint32_t walk_words(const ConstrainArgs& args, const Automaton& automaton, const AutomatonPlace& place,
                                      uint32_t first, uint32_t step) {
  const Vocabulary vocabulary{args.token_starts, args.token_text};
  const uint32_t lane = threadIdx.x % 32;
  uint32_t mine = 0;
  for (uint32_t n = 0; n < kWordsPerWarp && first + n * step < args.words; n++) {
    const uint32_t token = (first + n * step) * 32 + lane;
    Walk walk(automaton, place);
    const uint32_t word = __ballot_sync(~0u, token < args.vocab_size && vocabulary.take(walk, token));
    if (lane == n) mine = word;
  }
  return mine;
}

// grid: (blocks of a row, rows); all blocks of a row have kWordsPerWarp words or more for each of its warps.
extern "C" __global__ void __launch_bounds__(kConstrainThreads) list_allowed_tokens(const ConstrainArgs args) {
  __shared__ AutomatonPlace place;
  __shared__ bool is_sampled, may_end;
  const uint32_t row = blockIdx.y, lane = threadIdx.x % 32;
  const bool is_row = row < args.header->num_rows;
  const uint32_t slot = is_row ? uint32_t(args.row_slots[row]) : 0;
  const SlotParams& params = args.params[slot];
  if (!is_row || params.automaton == 0) {
    wait_for_others();
    if (blockIdx.x == 0 && threadIdx.x == 0) args.may_end[row] = 0;
    return;
  }
  const Automaton automaton(args.automata + uint64_t(params.automaton - 1) * kMaxAutomatonBytes);
  AutomatonPlace* places = args.places + slot * 2;
  const int32_t context = args.context_lens[row], generated = context - int32_t(params.num_prompt_tokens);
  const uint32_t count = generated > 0 ? uint32_t(generated) : 0;
  if (threadIdx.x == 0) {
    const int32_t last = args.tokens[uint64_t(slot) * args.max_model_len + uint32_t(context) - 1];
    is_sampled = find_place(automaton, {args.token_starts, args.token_text}, places, count, last, place);
    may_end = is_sampled && Walk(automaton, place).may_end();
  }
  __syncthreads();
  const uint32_t step = gridDim.x * kConstrainWarps;
  const uint32_t first = blockIdx.x * kConstrainWarps + threadIdx.x / 32, word = first + lane * step;
  uint32_t bits = is_sampled ? walk_words(args, automaton, place, first, step) : 0;
  const uint32_t stops = stops_of(args.stop_tokens + uint64_t(slot) * kMaxStopTokens, params.num_stop_tokens, word);
  bits = may_end ? bits | stops : bits & ~stops;
  wait_for_others();
  if (word < args.words) args.allowed[uint64_t(row) * args.words + word] = bits;
  if (blockIdx.x > 0 || threadIdx.x > 0) return;
  args.may_end[row] = may_end;
  if (is_sampled) places[count & 1] = place;
}

}  // namespace blink
