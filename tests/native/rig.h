// SPDX-License-Identifier: Apache-2.0
// What the native test programs share: a scheduler with a small region, a fake model with a checked KV cache, and a
// frontend's end of a queue pair.
#pragma once

#include <cstring>
#include <string>

#include "scheduler/integrity.h"
#include "scheduler/state_arrays.h"
#include "team.h"

namespace blink {

constexpr uint32_t kTags = 16;
constexpr uint32_t kVocab = 97;
constexpr uint32_t kBlockSize = 8;

inline int32_t next_token(const std::vector<int32_t>& tokens) {
  uint64_t sum = tokens.size() * 7;
  for (size_t i = 0; i < tokens.size(); i++) sum += uint64_t(tokens[i]) * (i + 1) * 31;
  return int32_t(sum % kVocab);
}

inline Geometry small_geometry(uint32_t queue_pairs) {
  Geometry g{};
  g.num_queue_pairs = queue_pairs;
  g.sq_entries = 16;
  g.cq_entries = 64;
  g.arena_bytes = kTags * 512;
  g.sequences_per_queue_pair = kTags;
  g.max_num_seqs = g.max_rows = 6;
  g.num_slots = 12;
  g.max_model_len = 64;
  g.block_size = kBlockSize;
  g.num_blocks = 20;
  g.max_blocks = 8;
  g.max_num_batched_tokens = 32;
  g.vocab_size = kVocab;
  g.prefix_caching = 1;
  g.priority_policy = 1;
  g.trace_entries = 16;
  g.hash_entries = 64;
  g.lru_entries = 128;
  g.num_decode_graphs = 2;
  for (const GraphSize size : {GraphSize{2, 2}, GraphSize{6, 6}, GraphSize{16, 6}, GraphSize{32, 6}})
    g.graphs[g.num_graphs++] = size;
  g.first_scoring_graph = g.num_graphs;
  for (const GraphSize size : {GraphSize{16, 6}, GraphSize{32, 6}}) g.graphs[g.num_graphs++] = size;
  g.num_plain_graphs = g.num_graphs;
  g.lease_timeout_ns = g.stall_timeout_ns = 60'000'000'000;
  g.max_queue_age_ns = 2'000'000'000;
  g.segment_ns = 1'000'000;
  g.best_effort_share = 200;
  g.overtake_share = 200;
  return g;
}

// A sound request: greedy, without stop tokens.
inline Sqe plain_request(uint64_t sequence, uint32_t max_tokens) {
  Sqe e{};
  e.opcode = uint32_t(Opcode::kSubmit);
  e.sequence = sequence;
  e.sampling.top_p = e.sampling.repetition_penalty = 1.0f;
  e.sampling.num_logprobs = -1;
  e.max_tokens = max_tokens;
  return e;
}

// Chained hashes of a prompt's full blocks, as good as the frontend's for a test without enemies.
inline std::vector<Hash> block_hashes(const std::vector<int32_t>& prompt) {
  std::vector<Hash> hashes;
  Hash h{0x9e3779b97f4a7c15ull, 0xc2b2ae3d27d4eb4full};
  for (size_t i = 0; i < prompt.size(); i++) {
    h.low = (h.low ^ uint64_t(prompt[i])) * 0x100000001b3ull;
    h.high = (h.high + h.low) * 0xff51afd7ed558ccdull;
    h.low ^= h.high >> 29;
    if ((i + 1) % kBlockSize == 0) hashes.push_back(h);
  }
  return hashes;
}

// Region, state and model of one scheduler.
class Rig {
 public:
  explicit Rig(uint32_t queue_pairs) : geometry_(small_geometry(queue_pairs)), kv_(geometry_.num_blocks * kBlockSize) {
    region_.resize(region_layout(geometry_).bytes + kPage);
    Header* header = reinterpret_cast<Header*>(align_up(reinterpret_cast<uint64_t>(region_.data()), kPage));
    header->geometry = geometry_;
    State sizes{};
    memory_.resize(lay_out_arrays(sizes, geometry_, 0) + 256);
    state_ = reinterpret_cast<State*>(align_up(reinterpret_cast<uint64_t>(memory_.data()), 256));
    *state_ = State{};
    state_->geometry = geometry_;
    lay_out_arrays(*state_, geometry_, reinterpret_cast<uint64_t>(state_));
    bind_region(*state_, geometry_, reinterpret_cast<uint64_t>(header));
  }
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  // Give the scheduler a table of costs, by which it cuts best-effort steps into segments.
  void cut_steps(uint32_t segments) {
    for (uint32_t graph = 0; graph < geometry_.num_graphs; graph++)
      state_->costs[graph] = GraphCost{50'000 + 1000ull * graph, 0, segments};
  }

  State& state() const { return *state_; }
  const Geometry& geometry() const { return geometry_; }

  // Play the model for what was launched: fill KV cells and sample from what the block tables hold. A step in segments
  // is computed with its last.
  void compute() {
    const StepBuffers& a = buffers_of(*state_, kind_in_flight(*state_));
    const bool is_over = kind_in_flight(*state_) == StepKind::kWhole || is_last_segment(*state_);
    for (uint32_t row = 0; is_over && row < a.header->num_rows; row++) fill(a, row);
    for (uint32_t row = 0; is_over && row < a.header->num_rows; row++) sample(a, row);
    store_release(a.output->done_step, a.header->step);
  }

 private:
  // What the KV cache holds of a position: its token, and a digest of all tokens up to it.
  struct Cell {
    int32_t token;
    uint64_t history;
  };
  static uint64_t extend(uint64_t history, int32_t token) { return (history + uint64_t(token) + 1) * 0x100000001b3ull; }
  const Cell& cell(const StepBuffers& a, uint32_t row, uint32_t at) const {
    const int32_t* table = block_table(*state_, uint32_t(a.row_slots[row]));
    return kv_[uint32_t(table[at / kBlockSize]) * kBlockSize + at % kBlockSize];
  }

  void fill(const StepBuffers& a, uint32_t row) {
    for (int32_t t = a.query_starts[row]; t < a.query_starts[row + 1]; t++) {
      const uint32_t at = uint32_t(a.positions[t]);
      const uint64_t before = at == 0 ? 0 : cell(a, row, at - 1).history;
      kv_[uint32_t(a.kv_slots[t])] = {a.input_ids[t], extend(before, a.input_ids[t])};
    }
  }

  void sample(const StepBuffers& a, uint32_t row) {
    std::vector<int32_t> tokens(size_t(a.context_lens[row]));
    uint64_t history = 0;
    bool sound = true;
    for (uint32_t i = 0; i < tokens.size(); i++) {
      tokens[i] = cell(a, row, i).token;
      history = extend(history, tokens[i]);
      sound = sound && cell(a, row, i).history == history;
    }
    // KV that another prompt left is wrong even where the tokens are the same.
    a.sampled_tokens[row] = (next_token(tokens) + !sound) % int32_t(kVocab);
    for (uint32_t rank = 0; rank < kMaxLogprobs; rank++) a.top_tokens[row * kMaxLogprobs + rank] = int32_t(rank);
  }

  Geometry geometry_;
  std::vector<uint8_t> region_, memory_;
  std::vector<Cell> kv_;
  State* state_ = nullptr;
};

// A frontend's end of a queue pair; each tag has its own span of the arena.
class Port {
 public:
  Port(Rig& rig, uint32_t qp) : g_(rig.geometry()), state_(rig.state()), qp_(qp), generations_(kTags) {}

  void request_attach() { store_release(words().attach, load_acquire(words().attach) + 1); }
  bool is_attached() const { return load_acquire(scheduler_words(state_, qp_).attached) == words().attach; }
  void start() {
    tail_ = load_acquire(scheduler_words(state_, qp_).sq_head);
    head_ = load_acquire(scheduler_words(state_, qp_).cq_tail);
    store_release(words().sq_tail, tail_);
    store_release(words().cq_head, head_);
  }
  void attach() {
    request_attach();
    while (!is_attached()) std::this_thread::yield();
    start();
  }
  void renew_lease() { store_release(words().lease, ++lease_); }
  uint32_t num_unread() const { return tail_ - load_acquire(scheduler_words(state_, qp_).sq_head); }
  bool has_room() const { return num_unread() < g_.sq_entries; }
  uint64_t sequence(uint32_t tag) const { return generations_[tag]; }

  void submit(Sqe e, const std::vector<int32_t>& prompt, uint32_t tag) {
    generations_[tag] = e.sequence;
    e.prompt_offset = tag * 512;
    e.num_prompt_tokens = uint32_t(prompt.size());
    const std::vector<Hash> hashes = block_hashes(prompt);
    e.hashes_offset = tag * 512 + 256;
    e.num_hashes = uint32_t(hashes.size());
    std::memcpy(arena() + e.prompt_offset, prompt.data(), prompt.size() * 4);
    if (!hashes.empty()) std::memcpy(arena() + e.hashes_offset, hashes.data(), hashes.size() * sizeof(Hash));
    push(e);
  }
  void push(const Sqe& e) {
    const_cast<Sqe&>(sq_entry(state_, qp_, tail_)) = e;
    store_release(words().sq_tail, ++tail_);
  }
  template <class Observe>
  void drain(Observe observe) {
    for (;;) {
      const Cqe& slot = cq_entry(state_, qp_, head_);
      const uint32_t tag = load_acquire(slot.tag);
      if (tag_of(tag).phase != cq_phase(head_, g_.cq_entries)) break;
      observe(slot);
      head_++;
    }
    store_release(words().cq_head, head_);
  }
  uint8_t* arena() const { return const_cast<uint8_t*>(blink::arena(state_, qp_)); }
  FrontendWords& words() const { return frontend_words(state_, qp_); }

 private:
  const Geometry& g_;
  State& state_;
  uint32_t qp_, tail_ = 0, head_ = 0, lease_ = 0;
  std::vector<uint64_t> generations_;
};

}  // namespace blink
