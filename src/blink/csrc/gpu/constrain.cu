// SPDX-License-Identifier: Apache-2.0
// The tokens that each row's automaton allows next: a walk over the bytes of every token of the vocabulary, from where
// the row's text stands. Needs nothing of the step's model, so it runs beside the kernel before it.
#include "automaton/walk.h"
#include "scheduler/state.h"

namespace blink {

constexpr uint32_t kConstrainThreads = 128, kWarp = 32;
constexpr uint32_t kTokensOfThread = 8;
constexpr uint32_t kTokensOfBlock = kConstrainThreads * kTokensOfThread;
// Of each block in shared memory, where it has room: else a block reads them where they are.
constexpr uint32_t kSharedAutomatonBytes = 24 << 10, kSharedTextBytes = 10 << 10;

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

// Copy bytes, whose place and number are multiples of 8, into shared memory if it has room; return where they are.
template <uint32_t room>
__device__ inline const uint8_t* bring_near(const uint8_t* from, uint32_t bytes, uint64_t (&shared)[room]) {
  if (bytes > room * sizeof(uint64_t)) return from;
  for (uint32_t i = threadIdx.x; i < bytes / sizeof(uint64_t); i += kConstrainThreads)
    shared[i] = reinterpret_cast<const uint64_t*>(from)[i];
  return reinterpret_cast<const uint8_t*>(shared);
}

// The tokens of one block, counted from its first.
struct NearTokens {
  uint32_t starts[kTokensOfBlock + 1];
  uint64_t text[kSharedTextBytes / sizeof(uint64_t)];

  __device__ Vocabulary bring(const ConstrainArgs& args, uint32_t first, uint32_t count) {
    constexpr uint32_t kUnit = sizeof(uint64_t);
    const uint32_t begin = args.token_starts[first] / kUnit * kUnit;
    const uint32_t bytes = (args.token_starts[first + count] - begin + kUnit - 1) / kUnit * kUnit;
    for (uint32_t i = threadIdx.x; i <= count; i += kConstrainThreads) starts[i] = args.token_starts[first + i] - begin;
    return {starts, bring_near(args.token_text + begin, bytes, text)};
  }
};

// grid: (blocks of a row, rows); the blocks of a row have a thread or more for every 8 of its tokens.
__global__ void __launch_bounds__(kConstrainThreads) list_allowed_tokens(const ConstrainArgs args) {
  __shared__ uint64_t near_automaton[kSharedAutomatonBytes / sizeof(uint64_t)];
  __shared__ NearTokens tokens;
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
  if (threadIdx.x == 0) {
    const Automaton automaton(bytes);
    const int32_t context = args.context_lens[row], generated = context - int32_t(params.num_prompt_tokens);
    const uint32_t count = generated > 0 ? uint32_t(generated) : 0;
    const int32_t last = args.tokens[uint64_t(slot) * args.max_model_len + uint32_t(context) - 1];
    is_sampled = find_place(automaton, {args.token_starts, args.token_text}, places, count, last, place);
    ends = is_sampled && may_end(automaton, place);
  }
  const uint32_t automaton_bytes = automaton_layout(*reinterpret_cast<const AutomatonHeader*>(bytes)).bytes;
  const uint8_t* near_bytes = bring_near(bytes, automaton_bytes, near_automaton);
  const uint32_t first = blockIdx.x * kTokensOfBlock;
  const uint32_t known = first < args.vocab_size ? least(kTokensOfBlock, args.vocab_size - first) : 0;
  const Vocabulary vocabulary = tokens.bring(args, least(first, args.vocab_size), known);
  __syncthreads();
  const Automaton automaton(near_bytes);
  // A warp has the tokens of 8 words, each lane one of every word.
  const uint32_t lane = threadIdx.x % kWarp, of_warp = threadIdx.x / kWarp * kWarp * kTokensOfThread;
  const uint32_t own = of_warp + lane, count = own < known ? (known - own + kWarp - 1) / kWarp : 0;
  uint32_t bits = 0;
  if (is_sampled) bits = vocabulary.list_allowed(automaton, place, own, least(count, kTokensOfThread), kWarp);
  __syncwarp();
  uint32_t found = 0;
  for (uint32_t i = 0; i < kTokensOfThread; i++) {
    const uint32_t word = __ballot_sync(~0u, bits >> i & 1);
    if (lane == i) found = word;
  }
  const uint32_t word = (first + of_warp) / kWarp + lane;
  const bool is_word = lane < kTokensOfThread && word < args.words;
  const int32_t* slot_stops = args.stop_tokens + uint64_t(slot) * kMaxStopTokens;
  const uint32_t stops = is_word ? stops_of(slot_stops, params.num_stop_tokens, word) : 0;
  wait_for_others();
  if (is_word) args.allowed[uint64_t(row) * args.words + word] = ends ? found | stops : found & ~stops;
  if (blockIdx.x > 0 || threadIdx.x > 0) return;
  args.may_end[row] = ends;
  if (is_sampled) keep_place(places, place);
}

}  // namespace blink
