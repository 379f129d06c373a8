// SPDX-License-Identifier: Apache-2.0
// What may follow in the states of an automaton's machine: how many texts, and which byte is guessed. Host only.
#pragma once

#include "automaton/machine.h"

namespace blink {

inline uint32_t width_of(const Machine& machine, uint32_t interval) {
  const uint32_t next = interval + 1 < machine.num_intervals ? machine.lows[interval + 1] : kBytes;
  return next - machine.lows[interval];
}

// Count how many texts lead from each state to its rule's end, as far as they are few and without calls.
inline std::vector<uint32_t> count_texts(const Machine& machine) {
  constexpr uint32_t kMany = kMaxUniqueItems + 1;
  std::vector<uint32_t> counts(machine.size(), kMany);
  std::vector<std::vector<uint32_t>> back(machine.size());
  std::vector<size_t> num_open(machine.size());
  std::vector<uint32_t> left;
  for (uint32_t state = 0; state < machine.size(); state++) {
    const auto& steps = machine.steps[state];
    num_open[state] = steps.size();
    for (const Step& step : steps) back[step.to].push_back(state);
    if (steps.empty()) left.push_back(state);
  }
  while (!left.empty()) {
    const uint32_t state = left.back();
    left.pop_back();
    uint32_t count = machine.finals[state];
    for (const Step& step : machine.steps[state])
      count = std::min(kMany, machine.is_call(step) ? kMany : count + width_of(machine, step.label) * counts[step.to]);
    counts[state] = count;
    for (const uint32_t from : back[state])
      if (--num_open[from] == 0) left.push_back(from);
  }
  return counts;
}

// What is guessed to come behind a state: a space after a colon or a comma, else what alone may come but for white
// space.
class Guesses {
 public:
  explicit Guesses(const Machine& machine) : machine_(machine), arrivals_(machine.size(), kUnreached) {
    for (const auto& steps : machine.steps)
      for (const Step& step : steps) {
        const bool is_byte = !machine.is_call(step) && width_of(machine, step.label) == 1;
        const uint32_t byte = is_byte ? machine.lows[step.label] : 0;
        arrivals_[step.to] = std::min(arrivals_[step.to], byte == ':' || byte == ',' ? kSeparated : kOtherwise);
      }
    for (const uint32_t start : machine.starts)
      if (start != kNowhere) arrivals_[start] = kOtherwise;
  }

  // The guess behind a state whose row holds these entries, by interval.
  uint8_t find(uint32_t state, const std::vector<uint32_t>& row) const {
    uint32_t num_texts = 0, text = kNoGuess;
    for (uint32_t interval = 0; interval < machine_.num_intervals; interval++) {
      if (row[interval] == kDeadEntry) continue;
      const uint32_t byte = machine_.lows[interval], width = width_of(machine_, interval);
      const bool is_blank = byte == ' ' && width == 1,
                 is_space = is_blank || (byte >= '\t' && byte + width <= '\r' + 1);
      if (is_blank && arrivals_[state] == kSeparated) return ' ';
      num_texts += is_space ? 0 : width;
      if (!is_space) text = byte;
    }
    if (machine_.finals[state]) return num_texts == 0 ? kReturnGuess : kNoGuess;
    return uint8_t(num_texts == 1 ? text : kNoGuess);
  }

 private:
  enum Arrival : uint8_t { kOtherwise, kSeparated, kUnreached };  // the second: by a colon or a comma alone

  const Machine& machine_;
  std::vector<Arrival> arrivals_;  // by state: how it is reached
};

}  // namespace blink
