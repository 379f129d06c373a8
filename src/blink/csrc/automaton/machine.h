// SPDX-License-Identifier: Apache-2.0
// What a grammar is while it becomes an automaton: first a nondeterministic graph, then one deterministic machine. Its
// labels are intervals of bytes and calls of rules. Host only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "region/automaton.h"
#include "region/fields.h"

namespace blink {

// An edge of the graph that a frontend builds: for symbols low .. high, or one of the labels below. Symbols are bytes
// in an automaton and code points in a language.
struct GraphEdge {
  uint32_t from, low, high, to;
};
constexpr uint32_t kCodePoints = 0x110000;
constexpr uint32_t kEmptyLabel = kCodePoints;     // takes nothing
constexpr uint32_t kRuleLabel = kCodePoints + 1;  // takes a text of rule `high`

// A part of the graph; rule 0 is the whole text.
struct GraphRule {
  uint32_t start, end;
  uint32_t is_greedy;  // takes as much as it can, where what follows could begin alike
  uint32_t mark;       // kItem: its texts are items that have to differ; kFirstItem: from those behind them alone
};
constexpr uint32_t kItem = 1, kFirstItem = 2, kSeparator = 3;  // the last: another item follows

struct Graph {
  FIELDS_OF(Graph);
  FIELD(const GraphEdge*, edges);
  FIELD(uint32_t, num_edges);
  FIELD(uint32_t, num_nodes);
  FIELD(const GraphRule*, rules);
  FIELD(uint32_t, num_rules);
};

enum class BuildError : int32_t { kTooLarge = -1, kEmpty = -2, kAmbiguous = -3 };

// What stands for the time and the memory that a build may take: some 5 ns each.
class Budget {
 public:
  explicit Budget(uint64_t most) : most_(most) {}
  void spend(uint64_t work) {
    used_ += work;
    if (used_ > most_) throw BuildError::kTooLarge;
  }

  uint64_t used() const { return used_; }

 private:
  uint64_t most_, used_ = 0;
};

constexpr uint64_t kWorkOfAutomaton = 100'000'000, kWorkOfLanguage = 20'000'000;

struct Step {
  uint32_t label, to;
};

// States of all rules together. Labels below num_intervals are intervals of symbols, those above are calls.
struct Machine {
  std::vector<std::vector<Step>> steps;
  std::vector<bool> finals;
  std::vector<uint32_t> starts;  // of each rule; kNowhere: it can produce nothing
  std::vector<uint32_t> needs;   // how much of the stack each state needs to come to an end
  std::vector<uint32_t> lows;    // the first symbol of each interval, ascending
  uint32_t num_intervals = 0;

  uint32_t size() const { return uint32_t(steps.size()); }
  uint32_t interval_of(uint32_t symbol) const {
    return uint32_t(std::upper_bound(lows.begin(), lows.end(), symbol) - lows.begin()) - 1;
  }
  bool is_call(const Step& step) const { return step.label >= num_intervals; }
  uint32_t rule_of(const Step& step) const { return step.label - num_intervals; }
};
constexpr uint32_t kNowhere = 0xffffffffu;

}  // namespace blink
