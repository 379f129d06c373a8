// SPDX-License-Identifier: Apache-2.0
// The tokens that each row's automaton allows next: a walk over the bytes of every token of the vocabulary, from where
// the row's text stands. Needs nothing of the step's model, so it runs beside the kernel before it.
#include "automaton/walk.h"
#include "scheduler/state.h"

namespace blink {

constexpr uint32_t kConstrainThreads = 128;           // each has a word of 32 tokens
constexpr uint32_t kSharedAutomatonBytes = 32 << 10;  // a larger automaton is read where it is

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

// Copy an automaton into shared memory if it has room there; return where it is.
__device__ inline const uint8_t* bring_near(const uint8_t* automaton, uint8_t* shared) {
  struct alignas(16) Quad {
    uint32_t words[4];
  };
  const uint32_t bytes = automaton_layout(*reinterpret_cast<const AutomatonHeader*>(automaton)).bytes;
  if (bytes > kSharedAutomatonBytes) return automaton;
  const auto* from = reinterpret_cast<const Quad*>(automaton);
  auto* to = reinterpret_cast<Quad*>(shared);
  for (uint32_t i = threadIdx.x; i < bytes / sizeof(Quad); i += kConstrainThreads) to[i] = from[i];
  return shared;
}

// grid: (blocks of a row, rows); the blocks of a row have a thread or more for each word of its tokens.
__global__ void __launch_bounds__(kConstrainThreads) list_allowed_tokens(const ConstrainArgs args) {
  extern __shared__ __align__(16) uint8_t memory[];
  __shared__ AutomatonPlace place;
  __shared__ bool is_sampled, ends;
  const uint32_t row = blockIdx.y;
  const bool is_row = row < args.header->num_rows;
  const uint32_t slot = is_row ? uint32_t(args.row_slots[row]) : 0;
  const SlotParams& params = args.params[slot];
  if (!is_row || params.automaton == 0) {
    wait_for_others();
    if (blockIdx.x == 0 && threadIdx.x == 0) args.may_end[row] = 0;
    return;
  }
  const uint8_t* bytes = args.automata + uint64_t(params.automaton - 1) * kMaxAutomatonBytes;
  AutomatonPlace* places = args.places + slot * 2;
  const Vocabulary vocabulary{args.token_starts, args.token_text};
  const int32_t context = args.context_lens[row], generated = context - int32_t(params.num_prompt_tokens);
  const uint32_t count = generated > 0 ? uint32_t(generated) : 0;
  if (threadIdx.x == 0) {
    const int32_t last = args.tokens[uint64_t(slot) * args.max_model_len + uint32_t(context) - 1];
    is_sampled = find_place(Automaton(bytes), vocabulary, places, count, last, place);
    ends = is_sampled && may_end(Automaton(bytes), place);
  }
  const uint8_t* near_bytes = bring_near(bytes, memory);
  __syncthreads();
  const Automaton automaton(near_bytes);
  const uint32_t word = blockIdx.x * kConstrainThreads + threadIdx.x, first = word * 32;
  uint32_t bits = 0;
  if (is_sampled && first < args.vocab_size)
    bits = vocabulary.list_allowed(automaton, place, first, least(32u, args.vocab_size - first));
  const uint32_t stops = stops_of(args.stop_tokens + uint64_t(slot) * kMaxStopTokens, params.num_stop_tokens, word);
  bits = ends ? bits | stops : bits & ~stops;
  wait_for_others();
  if (word < args.words) args.allowed[uint64_t(row) * args.words + word] = bits;
  if (blockIdx.x > 0 || threadIdx.x > 0) return;
  args.may_end[row] = ends;
  if (is_sampled) keep_place(places, place);
}

}  // namespace blink
