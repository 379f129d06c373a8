// SPDX-License-Identifier: Apache-2.0
// From a machine with calls to the tables of an automaton. One byte always says which call to make and when to return.
// A grammar that needs more than that is refused. Host only.
#pragma once

#include <bitset>
#include <cstring>
#include <map>
#include <string>
#include <tuple>

#include "automaton/texts.h"

namespace blink {

class Table {
 public:
  Table(const Machine& machine, const Graph& graph, Budget& budget, uint8_t* is_in_conflict)
      : machine_(machine), guesses_(machine), rules_(graph.rules, graph.rules + graph.num_rules), budget_(budget) {
    is_in_conflict_ = is_in_conflict;
    std::fill_n(is_in_conflict, graph.num_rules, uint8_t(0));
    find_first();
    for (uint32_t state = 0; state < machine.size(); state++) fill_row(state);
    check_returns();
    if (is_ambiguous_) throw BuildError::kAmbiguous;
    find_classes();
    sort_by_width();
    if (has_items_) counts_ = count_texts(machine);
  }

  std::string bytes() const {
    AutomatonHeader header{};
    header.num_full = uint16_t(num_of_width_[kFull]);
    header.num_mapped = uint16_t(num_of_width_[kMapped]);
    header.num_sparse = uint16_t(num_of_width_[kSparse]);
    header.num_single = uint16_t(num_of_width_[kSingle]);
    header.start = uint16_t(places_[machine_.starts[0]] | (has_items_ ? kMark : 0));
    header.num_classes = uint16_t(columns_.size());
    header.num_calls = uint16_t(calls_.size());
    header.num_patterns = uint16_t(patterns_.size());
    if (!valid_header(header)) throw BuildError::kTooLarge;
    const AutomatonLayout layout = automaton_layout(header);
    if (layout.bytes > kMaxAutomatonBytes) throw BuildError::kTooLarge;
    std::string out(layout.bytes, 0);
    std::memcpy(out.data(), &header, sizeof header);
    for (uint32_t byte = 0; byte < kBytes; byte++)
      out[sizeof header + byte] = char(class_of_[machine_.interval_of(byte)]);
    for (const auto& [call, index] : calls_) {
      const auto& [target, back, mark] = call;
      const uint32_t is_item = mark == kItem || mark == kFirstItem, is_limit = mark == kFirstItem || mark == kSeparator;
      const AutomatonCall entry{uint16_t(places_[target] | is_item * kMark),
                                uint16_t(places_[back] | is_limit * kMark)};
      std::memcpy(&out[layout.calls + index * sizeof entry], &entry, sizeof entry);
    }
    std::memset(&out[layout.full], 0xff, layout.mapped - layout.full);
    for (const auto& [pattern, index] : patterns_)
      std::memcpy(&out[layout.patterns + index * pattern.size()], pattern.data(), pattern.size());
    for (uint32_t state = 0; state < machine_.size(); state++) {
      write_row(state, layout, out);
      const uint32_t trait = machine_.needs[state] | (machine_.finals[state] ? kFinalTrait : 0) |
                             (has_items_ && counts_[state] == 1 ? kDecidedTrait : 0) |
                             (has_items_ && counts_[state] <= kMaxUniqueItems ? kFewTrait : 0);
      out[layout.traits + places_[state]] = char(trait);
    }
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
        if (rule > 0 && machine_.finals[machine_.starts[rule]]) mark_conflict(rule);
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
  void check_beginnings() {
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
          if (called == rule) {
            mark_conflict(rule);
            throw BuildError::kAmbiguous;
          }
          if (!seen[called]) left.push_back(called);
          seen[called] = true;
        }
      }
    }
  }

  void mark_conflict(uint32_t rule) {
    is_ambiguous_ = true;
    is_in_conflict_[rule] = 1;
  }

  void fill_row(uint32_t state) {
    std::vector<uint32_t> row(machine_.num_intervals, kDeadEntry);
    std::vector<uint32_t> callee(machine_.num_intervals, kNowhere);
    const auto put = [&](uint32_t interval, uint32_t entry, uint32_t rule) {
      if (row[interval] != kDeadEntry && row[interval] != entry)
        for (const uint32_t each : {rule, callee[interval]})
          if (each != kNowhere) mark_conflict(each);
      row[interval] = entry;
      callee[interval] = rule;
    };
    budget_.spend(machine_.num_intervals);
    for (const Step& step : machine_.steps[state]) {
      if (!machine_.is_call(step)) {
        put(step.label, step.to, kNowhere);
        continue;
      }
      const uint32_t rule = machine_.rule_of(step);
      const auto index = uint32_t(calls_.size());
      const auto call = calls_.try_emplace({machine_.starts[rule], step.to, rules_[rule].mark}, index).first;
      has_items_ = has_items_ || rules_[rule].mark;
      if (call->second >= kMaxAutomatonCalls) throw BuildError::kTooLarge;
      for (uint32_t interval = 0; interval < machine_.num_intervals; interval++)
        if (first_[rule][interval]) put(interval, kCallEntry + call->second, rule);
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
        if (machine_.finals[state] && (viable(state) & behind).any()) mark_conflict(rule);
    }
  }

  // Bytes that no state tells apart.
  void find_classes() {
    std::map<std::vector<uint32_t>, uint8_t> known;
    for (uint32_t interval = 0; interval < machine_.num_intervals; interval++) {
      std::vector<uint32_t> column;
      for (const auto& row : rows_) column.push_back(row[interval]);
      const auto [found, is_new] = known.try_emplace(std::move(column), uint8_t(columns_.size()));
      if (is_new) columns_.push_back(interval);
      class_of_.push_back(found->second);
    }
  }

  // Number the states by the kind of row that they get. Full rows are read at once, but large: where all of them have
  // no room, only states of many classes keep them; where these have none either, those that go on in themselves, as
  // inside of a text.
  void sort_by_width() {
    std::vector<uint32_t> of_width[kWidths], wide;
    const size_t row_bytes = columns_.size() * sizeof(uint16_t);
    const bool has_room_for_all = machine_.size() * row_bytes <= kFullRowBytes;
    for (uint32_t state = 0; state < machine_.size(); state++) {
      const size_t count = entries_of(state).size();
      if (has_room_for_all || count > kSparseClasses)
        wide.push_back(state);
      else
        of_width[count <= 1 ? kSingle : kSparse].push_back(state);
    }
    const bool has_room = wide.size() * row_bytes <= kFullRowBytes;
    for (const uint32_t state : wide) {
      const bool is_mapped = !has_room && !goes_on_in_itself(state) && add_pattern(state);
      of_width[is_mapped ? kMapped : kFull].push_back(state);
    }
    places_.resize(machine_.size());
    uint32_t place = 0;
    for (uint32_t width = 0; width < kWidths; width++) {
      num_of_width_[width] = uint32_t(of_width[width].size());
      for (const uint32_t state : of_width[width]) places_[state] = place++;
    }
    if (place > kMaxAutomatonStates) throw BuildError::kTooLarge;
  }

  bool goes_on_in_itself(uint32_t state) const {
    return std::find(rows_[state].begin(), rows_[state].end(), state) != rows_[state].end();
  }

  // The different entries of a state, in order, and by class which of them it is.
  std::pair<std::vector<uint32_t>, std::string> map_row(uint32_t state) const {
    std::vector<uint32_t> different;
    std::string pattern;
    for (const uint32_t column : columns_) {
      const uint32_t entry = rows_[state][column];
      const auto found = std::find(different.begin(), different.end(), entry);
      if (entry == kDeadEntry) {
        pattern.push_back(char(kNoMappedEntry));
        continue;
      }
      pattern.push_back(char(found - different.begin()));
      if (found == different.end()) different.push_back(entry);
    }
    return {different, pattern};
  }

  // Whether a state's row can be a mapped one; its pattern is known then.
  bool add_pattern(uint32_t state) {
    const auto [different, pattern] = map_row(state);
    if (different.size() > kMappedEntries) return false;
    patterns_.try_emplace(pattern, uint32_t(patterns_.size()));
    return true;
  }

  uint16_t placed(uint32_t entry) const { return uint16_t(entry < kCallEntry ? places_[entry] : entry); }

  // The classes that a state takes, and what is in its row for them.
  std::vector<std::pair<uint8_t, uint32_t>> entries_of(uint32_t state) const {
    std::vector<std::pair<uint8_t, uint32_t>> found;
    for (uint32_t column = 0; column < columns_.size(); column++)
      if (const uint32_t entry = rows_[state][columns_[column]]; entry != kDeadEntry)
        found.push_back({uint8_t(column), entry});
    return found;
  }

  void write_row(uint32_t state, const AutomatonLayout& layout, std::string& out) const {
    const auto entries = entries_of(state);
    const uint32_t first_mapped = num_of_width_[kFull], first_sparse = first_mapped + num_of_width_[kMapped];
    const uint32_t first_single = first_sparse + num_of_width_[kSparse], place = places_[state];
    const auto put = [&](uint32_t at, const auto& row) { std::memcpy(&out[at], &row, sizeof row); };
    if (place >= first_single) {
      SingleRow row{};
      row.entry = entries.empty() ? uint16_t(kDeadEntry) : placed(entries[0].second);
      row.byte_class = entries.empty() ? uint8_t(0) : entries[0].first;
      row.guess = guesses_.find(state, rows_[state]);
      put(layout.single + (place - first_single) * uint32_t(sizeof row), row);
    } else if (place >= first_sparse) {
      SparseRow row{};
      for (uint32_t i = 0; i < kSparseClasses; i++) {
        const auto& [column, entry] = entries[i < entries.size() ? i : 0];
        row.classes[i] = column;
        row.entries[i] = placed(entry);
      }
      row.guess = guesses_.find(state, rows_[state]);
      put(layout.sparse + (place - first_sparse) * uint32_t(sizeof row), row);
    } else if (place >= first_mapped) {
      const auto [different, pattern] = map_row(state);
      MappedRow row{};
      row.pattern = uint16_t(patterns_.at(pattern));
      for (uint32_t i = 0; i < kMappedEntries; i++)
        row.entries[i] = i < different.size() ? placed(different[i]) : uint16_t(kDeadEntry);
      put(layout.mapped + (place - first_mapped) * uint32_t(sizeof row), row);
    } else {
      for (const auto& [column, entry] : entries)
        put(layout.full + uint32_t((place * columns_.size() + column) * sizeof(uint16_t)), placed(entry));
      out[layout.guesses + place] = char(guesses_.find(state, rows_[state]));
    }
  }

  enum Width { kFull, kMapped, kSparse, kSingle, kWidths };
  static constexpr size_t kFullRowBytes = 40 << 10;

  const Machine& machine_;
  const Guesses guesses_;
  std::vector<GraphRule> rules_;
  std::vector<Intervals> first_;
  std::map<std::tuple<uint32_t, uint32_t, uint32_t>, uint32_t> calls_;  // target, way back and mark: index
  std::vector<std::vector<uint32_t>> rows_;
  std::vector<uint8_t> class_of_;             // by interval
  std::vector<uint32_t> columns_;             // the first interval of each class
  std::map<std::string, uint32_t> patterns_;  // of mapped rows
  std::vector<uint32_t> places_;              // by state: its number in the automaton
  std::vector<uint32_t> counts_;              // by state: the texts from there to an end, if they are few
  bool has_items_ = false;
  uint32_t num_of_width_[kWidths];  // states
  Budget& budget_;
  uint8_t* is_in_conflict_;
  bool is_ambiguous_ = false;
};

}  // namespace blink
