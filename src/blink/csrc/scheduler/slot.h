// SPDX-License-Identifier: Apache-2.0
// A sequence's slot: what the model reads of its request, copied out of the arena.
#pragma once

#include "scheduler/adapters.h"
#include "scheduler/automata.h"
#include "scheduler/ending.h"
#include "scheduler/intake.h"
#include "scheduler/ngram.h"
#include "scheduler/prefix_cache.h"

namespace blink {

// Values of a request's arena that are out of range.
struct Faults {
  uint32_t tokens, biases;
};
BLINK_FN Faults operator+(Faults a, Faults b) { return {a.tokens + b.tokens, a.biases + b.biases}; }

// Copy what the arena holds of a request into its slot. Each word is read once: its frontend may still change it.
template <class Env>
BLINK_RARE_FN RejectCode load_slot(Env& env, State& s, Sequence& q) {
  const Geometry& g = s.geometry;
  const Sqe& e = q.sqe;
  const uint8_t* from = arena(s, q.queue_pair);
  const auto* prompt = reinterpret_cast<const int32_t*>(from + e.prompt_offset);
  const auto* more_stops = reinterpret_cast<const int32_t*>(from + e.more_stop_offset);
  const auto* biases = reinterpret_cast<const int32_t*>(from + e.bias_offset);
  const auto* prediction = reinterpret_cast<const int32_t*>(from + e.prediction_offset);
  const Word* hashes = reinterpret_cast<const Word*>(from + e.hashes_offset);
  int32_t* tokens = s.tokens + uint64_t(q.slot) * g.max_model_len;
  int32_t* stops = s.stop_tokens + uint64_t(q.slot) * kMaxStopTokens;
  Faults bad{0, 0};
  const auto copy_tokens = [&](int32_t* to, const int32_t* source, uint32_t count) {
    for (uint32_t i = env.lane(); i < count; i += env.lanes()) {
      const int32_t token = source[i];
      to[i] = token;
      bad.tokens += token < 0 || uint32_t(token) >= g.vocab_size;
    }
  };
  const uint32_t inline_stops = least(e.num_stop_tokens, kInlineStopTokens);
  copy_tokens(tokens, prompt, e.num_prompt_tokens);
  if (speculates(s)) copy_tokens(prediction_of(s, q.slot), prediction, e.num_prediction_tokens);
  copy_tokens(stops, e.stop_tokens, inline_stops);
  copy_tokens(stops + inline_stops, more_stops, e.num_stop_tokens - inline_stops);
  copy_tokens(s.bias_tokens + uint64_t(q.slot) * kMaxLogitBiases, biases, e.num_biases);
  constexpr float most_bias = kMaxLogitBias;
  for (uint32_t i = env.lane(); i < e.num_biases; i += env.lanes()) {
    const float bias = reinterpret_cast<const float*>(biases + e.num_biases)[i];
    s.bias_values[uint64_t(q.slot) * kMaxLogitBiases + i] = bias;
    bad.biases += !within(bias, -most_bias, most_bias);
  }
  Word* slot_words = reinterpret_cast<Word*>(slot_hashes(s, q.slot));
  // By the last lanes first, so that a short prompt's hashes are on their way beside its tokens.
  for (uint32_t i = env.lanes() - 1 - env.lane(); i < e.num_hashes * (kBlockHashBytes / 4); i += env.lanes())
    slot_words[i] = hashes[i];
  if (!take_automaton(env, s, q)) return RejectCode::kAutomaton;
  if (env.lane() == 0) {
    take_adapter(s, q);
    s.params[q.slot] = SlotParams{e.sampling,      e.num_prompt_tokens, e.num_stop_tokens, e.num_biases,
                                  q.automaton + 1, q.adapter_slot,      content_of(s, q)};
  }
  bad = env.sum(bad);
  return bad.tokens > 0 ? RejectCode::kPromptToken : bad.biases > 0 ? RejectCode::kBiasValue : RejectCode::kNone;
}

// Give a waiting sequence a slot and its request's data. False if it must wait; a request with bad data is ended.
template <class Env>
BLINK_FN bool take_slot(Env& env, State& s, uint32_t index, uint64_t now) {
  Sequence& q = s.sequences[index];
  if (q.slot != kNone) return true;
  if (s.num_free_slots == 0) return false;
  env.sync();
  if (env.lane() == 0) {
    q.slot = s.free_slots[--s.num_free_slots];
    s.qps[q.queue_pair].num_slots++;
    s.qps[q.queue_pair].num_asking--;
  }
  env.sync();
  const RejectCode code = load_slot(env, s, q);
  if (code == RejectCode::kNone && speculates(s)) index_slot(env, s, q);
  if (code == RejectCode::kNone) return true;
  if (env.lane() == 0) reject(s, q.queue_pair, q.sqe.sequence, code, now);
  free_sequence(env, s, index);
  keep_only(env, s, SequenceStatus::kWaiting);
  return true;
}

}  // namespace blink
