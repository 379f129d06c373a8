// SPDX-License-Identifier: Apache-2.0
// Merge the states of a trimmed machine that accept the same. This is Hopcroft's partition refinement in the form for
// machines without a dead state: Valmari and Lehtinen, "Efficient minimization of DFAs with partial transition
// functions". Host only.
#pragma once

#include <algorithm>
#include <numeric>

#include "automaton/machine.h"

namespace blink {

// A partition of 0 .. n-1 whose sets are split by marking elements.
class Partition {
 public:
  explicit Partition(uint32_t count) : elements(count), places(count), sets(count, 0), marks_(count + 1, 0) {
    std::iota(elements.begin(), elements.end(), 0);
    std::iota(places.begin(), places.end(), 0);
    if (count > 0) ranges.push_back({0, count});
  }

  void mark(uint32_t element) {
    const uint32_t set = sets[element], from = places[element], to = ranges[set].first + marks_[set];
    std::swap(elements[from], elements[to]);
    places[elements[from]] = from;
    places[element] = to;
    if (marks_[set]++ == 0) touched_.push_back(set);
  }

  // Split each set with marks; the smaller part becomes a new one.
  void split() {
    while (!touched_.empty()) {
      const uint32_t set = touched_.back(), middle = ranges[set].first + marks_[set];
      touched_.pop_back();
      const uint32_t marked = std::exchange(marks_[set], 0);
      const auto [begin, end] = ranges[set];
      if (middle == end) continue;
      const bool is_less = marked <= end - middle;
      ranges.push_back(is_less ? std::pair{begin, middle} : std::pair{middle, end});
      ranges[set] = is_less ? std::pair{middle, end} : std::pair{begin, middle};
      for (uint32_t i = ranges.back().first; i < ranges.back().second; i++)
        sets[elements[i]] = uint32_t(ranges.size()) - 1;
    }
  }

  std::vector<uint32_t> elements, places, sets;
  std::vector<std::pair<uint32_t, uint32_t>> ranges;  // of each set, in `elements`

 private:
  std::vector<uint32_t> marks_, touched_;
};

class Minimize {
 public:
  Minimize(const Machine& machine, Budget& budget) : machine_(machine), budget_(budget) {
    for (uint32_t state = 0; state < machine.size(); state++)
      for (const Step& step : machine.steps[state]) edges_.push_back({state, step.label, step.to});
    std::stable_sort(edges_.begin(), edges_.end(), [](auto& a, auto& b) { return a.label < b.label; });
    into_.resize(machine.size());
    for (uint32_t i = 0; i < edges_.size(); i++) into_[edges_[i].to].push_back(i);
  }

  Machine run() {
    Partition states(machine_.size());
    for (uint32_t state = 0; state < machine_.size(); state++)
      if (machine_.finals[state]) states.mark(state);
    states.split();
    Partition edges = by_label();
    uint32_t next_states = 1;
    for (uint32_t set = 0; set < edges.ranges.size(); set++) {
      budget_.spend(edges.ranges[set].second - edges.ranges[set].first);
      for (uint32_t i = edges.ranges[set].first; i < edges.ranges[set].second; i++)
        states.mark(edges_[edges.elements[i]].from);
      states.split();
      for (; next_states < states.ranges.size(); next_states++) {
        for (uint32_t i = states.ranges[next_states].first; i < states.ranges[next_states].second; i++)
          for (const uint32_t edge : into_[states.elements[i]]) edges.mark(edge);
        edges.split();
      }
    }
    return merge(states);
  }

 private:
  struct Edge {
    uint32_t from, label, to;
  };

  Partition by_label() const {
    Partition edges(uint32_t(edges_.size()));
    edges.ranges.clear();
    for (uint32_t i = 0; i < edges_.size(); i++) {
      if (i == 0 || edges_[i].label != edges_[i - 1].label) edges.ranges.push_back({i, i});
      edges.ranges.back().second = i + 1;
      edges.sets[i] = uint32_t(edges.ranges.size()) - 1;
    }
    return edges;
  }

  Machine merge(const Partition& states) const {
    Machine merged;
    merged.lows = machine_.lows;
    merged.num_intervals = machine_.num_intervals;
    for (const auto& [begin, end] : states.ranges) {
      const uint32_t one = states.elements[begin];
      merged.finals.push_back(machine_.finals[one]);
      merged.needs.push_back(machine_.needs[one]);
      merged.steps.emplace_back();
      for (const Step& step : machine_.steps[one]) merged.steps.back().push_back({step.label, states.sets[step.to]});
    }
    for (const uint32_t start : machine_.starts)
      merged.starts.push_back(start == kNowhere ? start : states.sets[start]);
    return merged;
  }

  const Machine& machine_;
  std::vector<Edge> edges_;
  std::vector<std::vector<uint32_t>> into_;
  Budget& budget_;
};

}  // namespace blink
