// SPDX-License-Identifier: Apache-2.0
// Sampling on a CPU: each row by one thread, which is a group of its own. Masses are added up in float64.
#pragma once

#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/constrain.h"
#include "cpu/thread_pool.h"
#include "sampler/sample.h"

namespace blink {

struct SoloGroup {
  using Real = double;
  using Units = uint64_t;
  static constexpr int kBlocks = 1, kThreads = 1, kWarp = 1, kLoads = 1;
  using Four = float __attribute__((vector_size(sizeof(Quad))));
  // Finds extremes four at a time.
  class Range {
   public:
    void take(const Quad& quad) {
      const auto values = __builtin_bit_cast(Four, quad);
      largest_ = (values > largest_) | (values != values) ? values : largest_;
      smallest_ = values < smallest_ ? values : smallest_;
    }
    float largest() const { return larger(larger(largest_[0], largest_[1]), larger(largest_[2], largest_[3])); }
    float smallest() const { return smaller(smaller(smallest_[0], smallest_[1]), smaller(smallest_[2], smallest_[3])); }

   private:
    Four largest_ = -kInfinity + Four{}, smallest_ = kInfinity + Four{};
  };
  // Finds the first of the largest, or a NaN, and where it is: four at a time.
  class Peak {
   public:
    void take(const Quad& quad, uint32_t i) {
      const auto values = __builtin_bit_cast(Four, quad);
      const auto rises = (values > largest_) | (values != values);
      largest_ = rises ? values : largest_;
      quads_ = rises ? int32_t(i) + decltype(quads_){} : quads_;
    }
    template <class Part>
    Winner found(const Part& part) const {
      Winner winner{-kInfinity, ~0u};
      for (uint32_t j = 0; j < 4; j++)
        winner = better(winner, {largest_[j], (part.first + uint32_t(quads_[j])) * 4 + j});
      return winner;
    }

   private:
    Four largest_ = -kInfinity + Four{};
    int32_t quads_ __attribute__((vector_size(sizeof(Quad)))) = {};
  };
  static constexpr double kLog2BinUnit = 40, kLog2ListUnit = 50;  // of the largest weight; fewer than 2^14 are listed

  uint32_t thread() const { return 0; }
  uint32_t block() const { return 0; }
  void sync() const {}
  void arrive() const {}
  void wait() const {}
  void meet() const {}
  template <class T>
  T from_lane_xor(T value, int) const {
    return value;
  }
  template <class T>
  T from_lane_before(T value, int) const {
    return value;
  }
  template <class T>
  void tell(uint32_t, T& word, T value) const {
    word = value;
  }
  template <class T>
  T add(T& word, T value) const {
    return std::exchange(word, word + value);
  }
  template <class T>
  T add_in(uint32_t, T& word, T value) const {
    return add(word, value);
  }
  template <class T>
  void raise(T& word, T value) const {
    word = most(word, value);
  }
  template <class T>
  void lower(T& word, T value) const {
    word = least(word, value);
  }
  void lower_in(uint32_t, uint32_t& word, uint32_t value) const { lower(word, value); }
  uint32_t peek(const uint32_t& word) const { return word; }
  void set_bits(uint32_t& word, uint32_t bits) const { word |= bits; }

  static float larger(float a, float b) { return b > a || b != b ? b : a; }  // NaN if there is one
  static float smaller(float a, float b) { return b < a ? b : a; }
  float exp2(float exponent) const { return std::exp2(exponent); }
  double exp2(double exponent) const { return std::exp2(exponent); }
  double log(double value) const { return std::log(value); }
  double multiply_add(double a, double b, double c) const { return a * b + c; }
  uint64_t round(double value) const { return uint64_t(value + 0.5); }
};

// A block's part of a row of float32, where it is. It is as long as its quads: -inf where nothing is.
struct FloatPart {
  const float* row;
  uint32_t first, count;  // in quads
  uint32_t vocab_size;

  template <class Group>
  FloatPart(const Group& group, const float* logits, uint32_t vocab) : row(logits), vocab_size(vocab) {
    share_out(group, (vocab + 3) / 4, first, count);
  }

  Quad load(uint32_t i) const { return reinterpret_cast<const Quad*>(row)[first + i]; }
  float logit(uint32_t place) const { return row[first * 4 + place]; }
  float logit_of(uint32_t token) const { return row[token]; }
  uint32_t num_logits() const { return least(count * 4, vocab_size - first * 4); }
};

// A whole row of one thread, with memory for another. It is changed there once, for it is read often.
struct WholeRow : FloatPart {
  Quad* changed;

  WholeRow(const SoloGroup& group, const float* logits, uint32_t vocab, Quad* memory)
      : FloatPart(group, logits, vocab), changed(memory) {}

  Quad get(uint32_t i) const { return load(i); }
  WholeRow with(const Changes* changes) const {
    if (changes == nullptr) return *this;
    for (uint32_t i = 0; i < count; i++) changed[i] = changes->change(load(i), i, i);
    return {{}, changed->values, vocab_size, changed};
  }
};

// The rows of a step, and the batch's arrays.
struct SampledRows {
  FIELDS_OF(SampledRows);
  FIELD(const float*, logits);
  FIELD(const int32_t*, row_slots);
  FIELD(const int32_t*, context_lens);
  FIELD(const SlotParams*, params);
  FIELD(const int32_t*, tokens);
  FIELD(const int32_t*, stop_tokens);
  FIELD(const int32_t*, bias_tokens);
  FIELD(const float*, bias_values);
  FIELD(const uint8_t*, automata);
  FIELD(AutomatonPlace*, automaton_places);
  FIELD(uint32_t*, token_bitmasks);
  FIELD(const uint32_t*, token_starts);
  FIELD(const uint8_t*, token_text);
  FIELD(int32_t*, sampled_tokens);
  FIELD(float*, sampled_logprobs);
  FIELD(int32_t*, top_tokens);
  FIELD(float*, top_logprobs);
  FIELD(uint64_t, stride);  // between rows of logits
  FIELD(uint32_t, vocab_size);
  FIELD(uint32_t, list_vocab);  // tokens that have texts
  FIELD(uint32_t, max_model_len);
  FIELD(uint32_t, num_rows);
  FIELD(uint32_t, num_lists);  // of a slot, and of its places
};

// A thread's memory for one row.
struct RowMemory {
  std::vector<Quad> logits, changed;
  std::vector<ChangeWord> words;
  std::vector<uint32_t> values;
};

// The row that one is sampled from: [vocab_size], then -inf up to a multiple of 4.
struct SourceRow {
  const float* logits;
  uint32_t vocab_size;
  RowMemory& memory;  // words: of each block
};

// The tokens that a row's automaton allows; null: none. The slot moves on.
inline const uint32_t* find_allowed(const SampledRows& rows, uint64_t slot, const RowSlot& of, uint32_t& may_end) {
  const uint64_t words = list_words(rows.list_vocab);
  uint32_t* lists = rows.token_bitmasks + slot * rows.num_lists * words;
  const uint32_t num_prompt = of.params.num_prompt_tokens;
  ConstrainedRow row{rows.automata + uint64_t(of.params.automaton - 1) * kMaxAutomatonBytes,
                     rows.automaton_places + slot * rows.num_lists,
                     lists,
                     rows.num_lists,
                     rows.token_starts,
                     rows.token_text,
                     of.stop_tokens,
                     of.params.num_stop_tokens,
                     rows.list_vocab,
                     of.length > num_prompt ? of.length - num_prompt : 0,
                     of.tokens[of.length - 1],
                     0};
  const uint32_t list = list_allowed(row);
  may_end = row.may_end;
  return list == kNoList ? nullptr : lists + (list - 1) * words;
}

// Call sample(from, row, slot) with what one row is sampled from and where to; blocks: that share the row.
template <class Sample>
void with_row(const SampledRows& rows, uint32_t index, uint32_t blocks, RowMemory& memory, Sample sample) {
  const auto slot = uint64_t(rows.row_slots[index]);
  RowSlot of{rows.params[slot],
             rows.tokens + slot * rows.max_model_len,
             rows.stop_tokens + slot * kMaxStopTokens,
             rows.bias_tokens + slot * kMaxLogitBiases,
             rows.bias_values + slot * kMaxLogitBiases,
             uint32_t(rows.context_lens[index]),
             nullptr};
  const uint32_t quads = (rows.vocab_size + 3) / 4;
  memory.changed.resize(quads);
  memory.words.resize(blocks * change_words(quads));
  memory.values.resize(most_changes(rows.vocab_size, rows.max_model_len));
  SourceRow from{rows.logits + index * rows.stride, rows.vocab_size, memory};
  SampledRow row{0, rows.sampled_tokens + index, rows.sampled_logprobs + index, rows.top_tokens + index * kMaxLogprobs,
                 rows.top_logprobs + index * kMaxLogprobs};
  if (rows.vocab_size % 4 != 0 || reinterpret_cast<uintptr_t>(from.logits) % alignof(Quad) != 0) {
    memory.logits.assign(quads, Quad{{-kInfinity, -kInfinity, -kInfinity, -kInfinity}});
    std::copy_n(from.logits, rows.vocab_size, memory.logits.data()->values);
    from.logits = memory.logits.data()->values;
  }
  if (of.params.automaton > 0) of.allowed = find_allowed(rows, slot, of, row.may_end);
  sample(from, row, of);
}

// Sample all rows; pool: null, or threads that help.
inline void sample_rows(const SampledRows& rows, ThreadPool* pool) {
  struct Memory {
    RowMemory row;
    RowShared<SoloGroup> shared;
    Best best;
    Changes changes;
  };
  const auto sample_row_at = [&](uint64_t index) {
    thread_local const auto memory = std::make_unique<Memory>();
    with_row(rows, uint32_t(index), 1, memory->row,
             [](const SourceRow& from, const SampledRow& row, const RowSlot& slot) {
               const SoloGroup group;
               const WholeRow part(group, from.logits, from.vocab_size, from.memory.changed.data());
               const ChangeMemory changes{memory->changes, from.memory.words.data(), from.memory.values.data()};
               sample_row(group, memory->shared, memory->best, part, changes, row, slot);
             });
  };
  // The rows of one constrained text are sampled in order: each moves its automaton on.
  const auto sample = [&](uint64_t index) {
    const auto follows = [&](uint64_t row) { return row > 0 && rows.row_slots[row] == rows.row_slots[row - 1]; };
    if (rows.params[rows.row_slots[index]].automaton == 0) return sample_row_at(index);
    if (follows(index)) return;
    sample_row_at(index);
    while (++index < rows.num_rows && follows(index)) sample_row_at(index);
  };
  if (pool != nullptr) return pool->share(rows.num_rows, sample);
  for (uint32_t row = 0; row < rows.num_rows; row++) sample(row);
}

}  // namespace blink
