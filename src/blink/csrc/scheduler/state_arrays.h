// SPDX-License-Identifier: Apache-2.0
// Where the arrays of the scheduler's state are. Host only: the state is built here and then used where it lives.
#pragma once

#include "scheduler/state.h"

namespace blink {

// Call visit(name, pointer, count) for every array of the state, in memory order.
template <class Visit>
void visit_arrays(State& s, const Geometry& g, Visit visit) {
  const uint64_t sequences = uint64_t(g.num_queue_pairs) * g.sequences_per_queue_pair;
  const uint64_t slots = g.num_slots;
  const uint64_t rows = g.max_num_seqs;
  visit("batch", s.batch, 1);
  visit("output", s.output, 1);
  visit("input_ids", s.input_ids, g.max_num_batched_tokens);
  visit("positions", s.positions, g.max_num_batched_tokens);
  visit("kv_slots", s.kv_slots, g.max_num_batched_tokens);
  visit("query_starts", s.query_starts, rows + 1);
  visit("context_lens", s.context_lens, rows);
  visit("row_slots", s.row_slots, rows);
  visit("sampled_tokens", s.sampled_tokens, rows);
  visit("sampled_logprobs", s.sampled_logprobs, rows);
  visit("top_tokens", s.top_tokens, rows * kMaxLogprobs);
  visit("top_logprobs", s.top_logprobs, rows * kMaxLogprobs);
  visit("params", s.params, slots);
  visit("stop_tokens", s.stop_tokens, slots * kMaxStopTokens);
  visit("bias_tokens", s.bias_tokens, slots * kMaxLogitBiases);
  visit("bias_values", s.bias_values, slots * kMaxLogitBiases);
  visit("block_tables", s.block_tables, slots * g.max_blocks);
  visit("tokens", s.tokens, slots * g.max_model_len);
  visit("slot_hashes", s.slot_hashes, slots * g.max_blocks);
  visit("row_sequences", s.row_sequences, rows);
  visit("qps", s.qps, g.num_queue_pairs);
  visit("sequences", s.sequences, sequences);
  visit("running", s.running, rows);
  visit("waiting", s.waiting, sequences);
  visit("free_slots", s.free_slots, slots);
  visit("scratch", s.scratch, sequences);
  visit("victims", s.victims, g.num_blocks);
  visit("inbox", s.inbox, 1);
  visit("ref_counts", s.ref_counts, g.num_blocks);
  visit("free_blocks", s.free_blocks, g.num_blocks);
  visit("block_hashed", s.block_hashed, g.num_blocks);
  visit("block_hashes", s.block_hashes, g.num_blocks);
  visit("block_stamps", s.block_stamps, g.num_blocks);
  visit("hash_table", s.hash_table, g.hash_entries);
  visit("lru", s.lru, g.lru_entries);
  visit("log", s.log, g.log_entries);
}

// Place every array behind `base` (the address as the scheduler sees it) and return the bytes used.
inline uint64_t carve(State& state, const Geometry& geometry, uint64_t base) {
  uint64_t offset = align_up(sizeof(State), 256);
  visit_arrays(state, geometry, [&]<class T>(const char*, T*& pointer, uint64_t count) {
    pointer = reinterpret_cast<T*>(base + offset);
    offset = align_up(offset + count * sizeof(T), 256);
  });
  return offset;
}

// Point the state at the region as the scheduler sees it.
inline void bind_region(State& state, const Header& header, uint64_t region) {
  state.header = reinterpret_cast<Header*>(region);
  state.control = reinterpret_cast<Control*>(region + align_up(sizeof(Header), 64));
  state.trace = reinterpret_cast<TraceEntry*>(region + header.trace_offset);
  state.queue_pairs = reinterpret_cast<uint8_t*>(region + header.queue_pairs_offset);
  state.queue_pair = queue_pair_layout(header.geometry);
}

}  // namespace blink
