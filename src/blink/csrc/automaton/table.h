// SPDX-License-Identifier: Apache-2.0
// From a machine with calls to the tables of an automaton, where one byte always says which call to make and when to
// return; a grammar that needs more than that is refused. Host only.
#pragma once

#include <bitset>
#include <cstring>
#include <map>
#include <string>

#include "automaton/machine.h"

namespace blink {

class Table {
 public:
  Table(const Machine& machine, const GraphRule* rules, uint32_t num_rules, Budget& budget)
      : machine_(machine), rules_(rules, rules + num_rules), budget_(budget) {
    find_first();
    for (uint32_t state = 0; state < machine.size(); state++) fill_row(state);
    check_returns();
  }

  std::string bytes() const {
    std::vector<uint8_t> class_of;  // by interval
    std::vector<uint32_t> columns;  // the first interval of each class
    find_classes(class_of, columns);
    const AutomatonHeader header{machine_.size(), uint32_t(columns.size()), uint32_t(calls_.size()),
                                 machine_.starts[0]};
    if (!valid_header(header)) throw BuildError::kTooLarge;
    const AutomatonLayout layout = automaton_layout(header);
    if (layout.bytes > kMaxAutomatonBytes) throw BuildError::kTooLarge;
    std::string out(layout.bytes, 0);
    std::memcpy(out.data(), &header, sizeof header);
    for (uint32_t byte = 0; byte < kBytes; byte++)
      out[sizeof header + byte] = char(class_of[machine_.interval_of[byte]]);
    for (const auto& [call, index] : calls_) {
      const AutomatonCall entry{uint16_t(call.first), uint16_t(call.second)};
      std::memcpy(&out[layout.calls + index * sizeof entry], &entry, sizeof entry);
    }
    std::memset(&out[layout.rows], 0xff, layout.traits - layout.rows);
    char* at = &out[layout.rows];
    for (const auto& row : rows_)
      for (const uint32_t column : columns) {
        const auto entry = uint16_t(row[column]);
        std::memcpy(at, &entry, 2);
        at += 2;
      }
    for (uint32_t state = 0; state < machine_.size(); state++)
      out[layout.traits + state] = char(machine_.needs[state] | (machine_.finals[state] ? kFinalTrait : 0));
    return out;
  }

 private:
  using Intervals = std::bitset<kBytes>;

  // The bytes with which each rule can begin. A rule that can begin with itself has no end, an empty one no beginning.
  void find_first() {
    const auto count = uint32_t(rules_.size());
    first_.resize(count);
    for (uint32_t round = 0; round <= count; round++) {
      bool changed = false;
      for (uint32_t rule = 0; rule < count; rule++) {
        if (machine_.starts[rule] == kNowhere) continue;
        if (rule > 0 && machine_.finals[machine_.starts[rule]]) throw BuildError::kAmbiguous;
        const Intervals before = first_[rule];
        for (const Step& step : machine_.steps[machine_.starts[rule]])
          if (machine_.is_call(step))
            first_[rule] |= first_[machine_.rule_of(step)];
          else
            first_[rule].set(step.label);
        changed = changed || first_[rule] != before;
      }
      if (!changed) break;
    }
    check_beginnings();
  }

  // No rule may call itself before it has taken a byte.
  void check_beginnings() const {
    const auto count = uint32_t(rules_.size());
    for (uint32_t rule = 0; rule < count; rule++) {
      std::vector<bool> seen(count);
      std::vector<uint32_t> left{rule};
      while (!left.empty()) {
        const uint32_t start = machine_.starts[left.back()];
        left.pop_back();
        if (start == kNowhere) continue;
        for (const Step& step : machine_.steps[start]) {
          if (!machine_.is_call(step)) continue;
          const uint32_t called = machine_.rule_of(step);
          if (called == rule) throw BuildError::kAmbiguous;
          if (!seen[called]) left.push_back(called);
          seen[called] = true;
        }
      }
    }
  }

  void fill_row(uint32_t state) {
    std::vector<uint32_t> row(machine_.num_intervals, kDeadEntry);
    const auto put = [&](uint32_t interval, uint32_t entry) {
      if (row[interval] != kDeadEntry) throw BuildError::kAmbiguous;
      row[interval] = entry;
    };
    budget_.spend(machine_.num_intervals);
    for (const Step& step : machine_.steps[state]) {
      if (!machine_.is_call(step)) {
        put(step.label, step.to);
        continue;
      }
      const uint32_t rule = machine_.rule_of(step);
      const auto index = uint32_t(calls_.size());
      const auto call = calls_.try_emplace({machine_.starts[rule], step.to}, index).first;
      if (call->second >= kMaxAutomatonCalls) throw BuildError::kTooLarge;
      for (uint32_t interval = 0; interval < machine_.num_intervals; interval++)
        if (first_[rule][interval]) put(interval, kCallEntry + call->second);
    }
    rows_.push_back(std::move(row));
  }

  Intervals viable(uint32_t state) const {
    Intervals found;
    for (uint32_t interval = 0; interval < machine_.num_intervals; interval++)
      found[interval] = rows_[state][interval] != kDeadEntry;
    return found;
  }

  // The states of each rule.
  std::vector<std::vector<uint32_t>> states_of_rules() {
    std::vector<std::vector<uint32_t>> states(rules_.size());
    for (uint32_t rule = 0; rule < rules_.size(); rule++) {
      if (machine_.starts[rule] == kNowhere) continue;
      std::vector<bool> seen(machine_.size());
      states[rule].push_back(machine_.starts[rule]);
      seen[machine_.starts[rule]] = true;
      for (uint32_t i = 0; i < states[rule].size(); i++)
        for (const Step& step : machine_.steps[states[rule][i]]) {
          budget_.spend(1);
          if (!seen[step.to]) states[rule].push_back(step.to);
          seen[step.to] = true;
        }
    }
    return states;
  }

  // In a final state a byte must not both go on and return.
  void check_returns() {
    const auto states = states_of_rules();
    std::vector<Intervals> follow(rules_.size());
    for (bool changed = true; changed;) {
      changed = false;
      for (uint32_t caller = 0; caller < rules_.size(); caller++)
        for (const uint32_t state : states[caller])
          for (const Step& step : machine_.steps[state]) {
            if (!machine_.is_call(step)) continue;
            budget_.spend(4);
            Intervals& behind = follow[machine_.rule_of(step)];
            const Intervals before = behind;
            behind |= viable(step.to);
            if (machine_.finals[step.to]) behind |= follow[caller];
            changed = changed || behind != before;
          }
    }
    for (uint32_t rule = 1; rule < rules_.size(); rule++) {
      const Intervals behind = rules_[rule].is_greedy ? follow[rule] & ~first_[rule] : follow[rule];
      for (const uint32_t state : states[rule])
        if (machine_.finals[state] && (viable(state) & behind).any()) throw BuildError::kAmbiguous;
    }
  }

  // Bytes that no state tells apart.
  void find_classes(std::vector<uint8_t>& class_of, std::vector<uint32_t>& columns) const {
    std::map<std::vector<uint32_t>, uint8_t> known;
    for (uint32_t interval = 0; interval < machine_.num_intervals; interval++) {
      std::vector<uint32_t> column;
      for (const auto& row : rows_) column.push_back(row[interval]);
      const auto [found, is_new] = known.try_emplace(std::move(column), uint8_t(columns.size()));
      if (is_new) columns.push_back(interval);
      class_of.push_back(found->second);
    }
  }

  const Machine& machine_;
  std::vector<GraphRule> rules_;
  std::vector<Intervals> first_;
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> calls_;  // target and way back: index
  std::vector<std::vector<uint32_t>> rows_;
  Budget& budget_;
};

}  // namespace blink
