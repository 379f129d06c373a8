// SPDX-License-Identifier: Apache-2.0
// Leave of a machine what can be reached and can come to an end, and find how much of the stack that takes. Host only.
#pragma once

#include "automaton/machine.h"

namespace blink {

class Trim {
 public:
  Trim(Machine machine, Budget& budget) : machine_(std::move(machine)), budget_(budget) {}

  Machine run() {
    find_needs();
    const auto can_end = [&](uint32_t state) { return machine_.needs[state] != kNowhere; };
    if (!can_end(machine_.starts[0])) throw BuildError::kEmpty;
    for (auto& steps : machine_.steps)
      std::erase_if(steps, [&](const Step& step) {
        return !can_end(step.to) || (machine_.is_call(step) && !can_end(machine_.starts[machine_.rule_of(step)]));
      });
    find_reached();
    return keep_reached();
  }

 private:
  // A state needs no more than `depth` if it is final, or a byte leads to such a state, or a call of a rule that needs
  // less, behind which there is such a state.
  void find_needs() {
    machine_.needs.assign(machine_.size(), kNowhere);
    std::vector<std::vector<Step>> back(machine_.size());
    for (uint32_t state = 0; state < machine_.size(); state++)
      for (const Step& step : machine_.steps[state]) back[step.to].push_back({step.label, state});
    for (uint32_t depth = 0; depth <= kMaxNeed; depth++) {
      std::vector<uint32_t> found;
      for (uint32_t state = 0; state < machine_.size(); state++)
        if (machine_.needs[state] != kNowhere || (depth == 0 && machine_.finals[state])) found.push_back(state);
      std::vector<bool> is_callable;
      for (const uint32_t start : machine_.starts) is_callable.push_back(machine_.needs[start] < depth);
      bool changed = depth == 0;
      for (const uint32_t state : found) machine_.needs[state] = std::min(machine_.needs[state], depth);
      while (!found.empty()) {
        const uint32_t state = found.back();
        found.pop_back();
        budget_.spend(1 + back[state].size());
        for (const Step& step : back[state]) {
          if (machine_.needs[step.to] != kNowhere) continue;
          if (machine_.is_call(step) && !is_callable[machine_.rule_of(step)]) continue;
          machine_.needs[step.to] = depth;
          found.push_back(step.to);
          changed = true;
        }
      }
      if (!changed) return;
    }
  }

  void find_reached() {
    place_.assign(machine_.size(), kNowhere);
    std::vector<uint32_t> left;
    uint32_t num_reached = 0;
    const auto reach = [&](uint32_t state) {
      if (place_[state] != kNowhere) return;
      place_[state] = num_reached++;
      left.push_back(state);
    };
    reach(machine_.starts[0]);
    while (!left.empty()) {
      const uint32_t state = left.back();
      left.pop_back();
      budget_.spend(1 + machine_.steps[state].size());
      for (const Step& step : machine_.steps[state]) {
        if (machine_.is_call(step)) reach(machine_.starts[machine_.rule_of(step)]);
        reach(step.to);
      }
    }
    num_reached_ = num_reached;
  }

  Machine keep_reached() {
    Machine kept;
    kept.lows = machine_.lows;
    kept.num_intervals = machine_.num_intervals;
    kept.steps.resize(num_reached_);
    kept.finals.resize(num_reached_);
    kept.needs.resize(num_reached_);
    for (uint32_t state = 0; state < machine_.size(); state++) {
      const uint32_t place = place_[state];
      if (place == kNowhere) continue;
      kept.finals[place] = machine_.finals[state];
      kept.needs[place] = machine_.needs[state];
      for (const Step& step : machine_.steps[state]) kept.steps[place].push_back({step.label, place_[step.to]});
    }
    for (const uint32_t start : machine_.starts) kept.starts.push_back(place_[start]);
    return kept;
  }

  Machine machine_;
  std::vector<uint32_t> place_;
  uint32_t num_reached_ = 0;
  Budget& budget_;
};

}  // namespace blink
