// SPDX-License-Identifier: Apache-2.0
// The tokens that each row's automaton allows next. One kernel advances the rows' automata by their last tokens. The
// other lists, for rows whose state changed by that, what may follow: it walks over the bytes of every token of the
// vocabulary. Lists stay with their slots, for inside of a string most tokens leave the state as it is.
#include "automaton/advance.h"
#include "kernels/args.h"
#include "scheduler/state.h"

namespace blink {

constexpr uint32_t kListThreads = 512, kWarp = 32;
constexpr uint32_t kListBlocksOfSm = 3;
constexpr uint32_t kMostLists = kListsOfSlot - 1 + kMaxRowsOfSlot;
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

// What is known of a row: its list, whether its text may end, and the place that its list is to be made for.
struct FoundRow {
  int32_t list, may_end, new_place;
};

// Whether a row's slot is that of the row before.
__device__ inline bool follows(const ConstrainArgs& args, uint32_t row) {
  return row > 0 && row < args.header->num_rows && args.row_slots[row] == args.row_slots[row - 1];
}

// How many tokens of a row's text were generated.
__device__ inline uint32_t count_generated(const ConstrainArgs& args, uint32_t slot, uint32_t row) {
  const int32_t generated = args.context_lens[row] - int32_t(args.params[slot].num_prompt_tokens);
  return generated > 0 ? uint32_t(generated) : 0;
}

// Find the place behind a row's last token, from a copy of its slot's latest places. Runs on: one lane.
__device__ inline FoundRow find_row(const ConstrainArgs& args, const Automaton& automaton, uint32_t slot, uint32_t row,
                                    const AutomatonPlace* places, AutomatonPlace& place) {
  const uint32_t count = count_generated(args, slot, row), first = slot * args.num_lists;
  const int32_t last = args.tokens[uint64_t(slot) * args.max_model_len + uint32_t(args.context_lens[row]) - 1];
  const Listing listing =
      advance(automaton, {args.token_starts, args.token_text}, places, args.num_lists, count, last, place);
  if (listing == Listing::kNothing) return {kNoIndex, 0, kNoIndex};
  return {int32_t(first + place.list - 1), may_end(automaton, place),
          listing == Listing::kNew ? int32_t(first + count % args.num_lists) : kNoIndex};
}

// grid: rows, of one warp: that of a slot's first row moves it on by all its rows, in order. Needs nothing of the
// step's model, so it runs beside the kernel before it; but it does not end before that, for those behind it read what
// that one has written.
__global__ void __launch_bounds__(kWarp) find_places(const ConstrainArgs args) {
  __shared__ AutomatonPlace places[kMostLists], place;
  __shared__ FoundRow found[kMaxRowsOfSlot];
  const uint32_t first = blockIdx.x;
  if (follows(args, first)) return wait_for_others();
  uint32_t count = 1, words = 0;
  while (count < kMaxRowsOfSlot && follows(args, first + count)) count++;
  const uint32_t slot = first < args.header->num_rows ? uint32_t(args.row_slots[first]) : 0;
  const bool is_constrained = first < args.header->num_rows && args.params[slot].automaton != 0;
  AutomatonPlace* own = args.places + uint64_t(slot) * args.num_lists;
  if (threadIdx.x < count) found[threadIdx.x] = {kNoIndex, 0, kNoIndex};
  if (is_constrained) {
    const Automaton automaton(automaton_of(args, slot));
    words = place_words(automaton);
    for (uint32_t i = 0; i < args.num_lists; i++) copy_place(places[i], own[i], words);
    __syncwarp();
    for (uint32_t i = 0; i < count; i++) {
      if (threadIdx.x == 0) found[i] = find_row(args, automaton, slot, first + i, places, place);
      __syncwarp();
      const uint32_t at = count_generated(args, slot, first + i) % args.num_lists;
      if (found[i].list != kNoIndex) copy_place(places[at], place, words);
      __syncwarp();
    }
  }
  __syncwarp();
  wait_for_others();
  for (uint32_t i = 0; is_constrained && i < args.num_lists; i++) copy_place(own[i], places[i], words);
  if (threadIdx.x >= count) return;
  args.lists[first + threadIdx.x] = found[threadIdx.x].list;
  args.may_end[first + threadIdx.x] = found[threadIdx.x].may_end;
  args.new_places[first + threadIdx.x] = found[threadIdx.x].new_place;
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
  const uint32_t slot = uint32_t(at) / args.num_lists, share = (args.words + gridDim.x - 1) / gridDim.x;
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
