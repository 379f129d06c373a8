// SPDX-License-Identifier: Apache-2.0
// The tokens that each row's automaton allows next. One kernel advances the rows' automata by their last tokens. The
// other lists, for rows whose state changed by that, what may follow: it walks over the bytes of every token of the
// vocabulary. Lists stay with their slots, for inside of a string most tokens leave the state as it is.
#include "automaton/walk.h"
#include "kernels/args.h"
#include "scheduler/state.h"

namespace blink {

constexpr uint32_t kListThreads = 512, kWarp = 32;
constexpr uint32_t kListBlocksOfSm = 3;
constexpr int32_t kNoIndex = -1;

// What was read or written before by other kernels is free from here on.
__device__ inline void wait_for_others() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline const uint8_t* automaton_of(const ConstrainArgs& args, uint32_t slot) {
  return args.automata + uint64_t(args.params[slot].automaton - 1) * kMaxAutomatonBytes;
}

// One warp copies what an automaton uses of a place.
__device__ inline void copy_place(AutomatonPlace& to, const AutomatonPlace& from, uint32_t words) {
  auto* target = reinterpret_cast<uint32_t*>(&to);
  const auto* source = reinterpret_cast<const uint32_t*>(&from);
  static_assert(kPlaceWords == kWarp);
  target[threadIdx.x] = source[threadIdx.x];
  for (uint32_t i = threadIdx.x + kWarp; i < words; i += kWarp) target[i] = source[i];
}

// grid: rows, of one warp. Needs nothing of the step's model, so it runs beside the kernel before it; but it does not
// end before that, for those behind it read what that one has written.
__global__ void __launch_bounds__(kWarp) find_places(const ConstrainArgs args) {
  __shared__ AutomatonPlace before[2], place;
  const uint32_t row = blockIdx.x;
  const bool is_row = row < args.header->num_rows;
  const uint32_t slot = is_row ? uint32_t(args.row_slots[row]) : 0;
  uint32_t at = 0, words = 0;
  bool ends = false;
  Listing listing = Listing::kNothing;
  if (is_row && args.params[slot].automaton != 0) {
    const int32_t context = args.context_lens[row], generated = context - int32_t(args.params[slot].num_prompt_tokens);
    const uint32_t count = generated > 0 ? uint32_t(generated) : 0;
    const int32_t last = args.tokens[uint64_t(slot) * args.max_model_len + uint32_t(context) - 1];
    const Automaton automaton(automaton_of(args, slot));
    words = place_words(automaton);
    for (uint32_t i = 0; i < 2; i++) copy_place(before[i], args.places[slot * 2 + i], words);
    __syncwarp();
    at = slot * 2 + (count & 1);
    if (threadIdx.x == 0) {
      listing = advance(automaton, {args.token_starts, args.token_text}, before, 2, count, last, place);
      ends = listing != Listing::kNothing && may_end(automaton, place);
    }
    __syncwarp();
    listing = Listing(__shfl_sync(~0u, uint32_t(listing), 0));
  }
  wait_for_others();
  if (listing != Listing::kNothing) copy_place(args.places[at], place, words);
  if (threadIdx.x > 0) return;
  args.lists[row] = listing == Listing::kNothing ? kNoIndex : int32_t(slot * kListsOfSlot + place.list - 1);
  args.may_end[row] = ends;
  args.new_places[row] = listing == Listing::kNew ? int32_t(at) : kNoIndex;
}

// List a block's share of the tokens; its words begin at `first`.
template <Items kItems>
__device__ inline void list_share(const Vocabulary& vocabulary, uint32_t vocab_size, const Automaton& automaton,
                                  const AutomatonPlace& place, uint32_t first, uint32_t end, uint32_t* list) {
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t word = first + threadIdx.x / kWarp; word < end; word += kListThreads / kWarp) {
    const uint32_t token = word * kWarp + lane;
    const bool is_allowed = token < vocab_size && vocabulary.allows<kItems>(automaton, place, token);
    __syncwarp();
    const uint32_t found = __ballot_sync(~0u, is_allowed);
    if (lane == 0) list[word] = found;
  }
}

// A piece of code of its own: beside it the walks without items keep their registers.
__device__ __noinline__ void list_share_of_items(Vocabulary vocabulary, uint32_t vocab_size, const uint8_t* automaton,
                                                 const AutomatonPlace& place, uint32_t first, uint32_t end,
                                                 uint32_t* list) {
  list_share<Items::kCompare>(vocabulary, vocab_size, Automaton(automaton), place, first, end, list);
}

// grid: (blocks of a row, rows). Reads what find_places() has found, so it waits for it first. A block brings its
// automaton near, if that has room, else reads it where it is.
__global__ void __launch_bounds__(kListThreads, kListBlocksOfSm) list_allowed_tokens(const ConstrainArgs args) {
  extern __shared__ uint4 near_automaton[];
  __shared__ AutomatonPlace place;
  wait_for_others();
  const uint32_t row = blockIdx.y;
  const int32_t at = args.new_places[row];
  if (at == kNoIndex) return;
  const uint32_t slot = uint32_t(at) / 2, share = (args.words + gridDim.x - 1) / gridDim.x;
  const uint32_t first = blockIdx.x * share, end = least(first + share, args.words);
  uint32_t* list = args.bits + uint64_t(args.lists[row]) * args.words;
  const uint8_t* bytes = automaton_of(args, slot);
  const uint32_t automaton_bytes = automaton_layout(*reinterpret_cast<const AutomatonHeader*>(bytes)).bytes;
  const bool has_items = Automaton(bytes).has_items();
  if (threadIdx.x < kWarp) copy_place(place, args.places[at], place_words(Automaton(bytes)));
  const bool is_near = automaton_bytes <= args.shared_bytes;
  for (uint32_t i = threadIdx.x; is_near && i < automaton_bytes / sizeof(uint4); i += kListThreads)
    near_automaton[i] = reinterpret_cast<const uint4*>(bytes)[i];
  __syncthreads();
  // Twice, so that the compiler knows which memory it reads.
  const Vocabulary vocabulary{args.token_starts, args.token_text};
  const auto* near_bytes = reinterpret_cast<const uint8_t*>(near_automaton);
  if (has_items)
    list_share_of_items(vocabulary, args.vocab_size, is_near ? near_bytes : bytes, place, first, end, list);
  else if (is_near)
    list_share<Items::kNone>(vocabulary, args.vocab_size, Automaton(near_bytes), place, first, end, list);
  else
    list_share<Items::kNone>(vocabulary, args.vocab_size, Automaton(bytes), place, first, end, list);
  __syncthreads();
  // Where the text may end, stop tokens may come, whatever they are; elsewhere they may not.
  const int32_t* stops = args.stop_tokens + uint64_t(slot) * kMaxStopTokens;
  const bool ends = args.may_end[row];
  for (uint32_t i = threadIdx.x; i < args.params[slot].num_stop_tokens; i += kListThreads) {
    const uint32_t stop = uint32_t(stops[i]), word = stop / kWarp, bit = 1u << stop % kWarp;
    if (word < first || word >= end) continue;
    if (ends)
      atomicOr(list + word, bit);
    else
      atomicAnd(list + word, ~bit);
  }
}

}  // namespace blink
