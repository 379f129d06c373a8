// SPDX-License-Identifier: Apache-2.0
// The subset construction: from a nondeterministic graph to a deterministic machine. Host only.
#pragma once

#include <algorithm>
#include <map>
#include <unordered_map>

#include "automaton/machine.h"

namespace blink {

class Subsets {
 public:
  Subsets(const Graph& graph, uint32_t num_symbols, Budget& budget)
      : edges_(graph.edges, graph.edges + graph.num_edges),
        rules_(graph.rules, graph.rules + graph.num_rules),
        budget_(budget) {
    std::stable_sort(edges_.begin(), edges_.end(), [](auto& a, auto& b) { return a.from < b.from; });
    first_.assign(graph.num_nodes + 1, 0);
    for (const GraphEdge& edge : edges_) first_[edge.from + 1]++;
    for (uint32_t node = 0; node < graph.num_nodes; node++) first_[node + 1] += first_[node];
    is_end_.assign(graph.num_nodes, false);
    for (const GraphRule& rule : rules_) is_end_[rule.end] = true;
    seen_.assign(graph.num_nodes, 0);
    replace_last_calls();
    find_intervals(num_symbols);
  }

  Machine run() {
    for (const GraphRule& rule : rules_) machine_.starts.push_back(state_of({rule.start}));
    for (uint32_t state = 0; state < sets_.size(); state++) expand(state);
    return std::move(machine_);
  }

 private:
  using Set = std::vector<uint32_t>;
  struct Hash {
    size_t operator()(const Set& set) const {
      size_t hash = set.size();
      for (const uint32_t node : set) hash = (hash ^ node) * 0x9e3779b97f4a7c15ull + (hash >> 29);
      return hash;
    }
  };
  static constexpr uint32_t kMostStates = 100'000;

  // A call behind which its rule ends goes on in the called rule, whose end is the caller's: it takes no stack.
  void replace_last_calls() {
    const auto is_last = [&](uint32_t node) { return is_end_[node] && first_[node] == first_[node + 1]; };
    for (GraphEdge& edge : edges_)
      if (edge.low == kRuleLabel && is_last(edge.to) && !rules_[edge.high].is_greedy && !rules_[edge.high].mark)
        edge = {edge.from, kEmptyLabel, kEmptyLabel, rules_[edge.high].start};
  }

  void find_intervals(uint32_t num_symbols) {
    std::vector<uint32_t>& lows = machine_.lows;
    lows.push_back(0);
    for (const GraphEdge& edge : edges_)
      if (edge.low < num_symbols) lows.insert(lows.end(), {edge.low, edge.high + 1});
    std::sort(lows.begin(), lows.end());
    lows.erase(std::unique(lows.begin(), lows.end()), lows.end());
    while (lows.back() >= num_symbols) lows.pop_back();
    machine_.num_intervals = uint32_t(lows.size());
  }

  // The state of a set of nodes and all that they reach for nothing.
  uint32_t state_of(Set nodes) {
    stamp_++;
    for (const uint32_t node : nodes) seen_[node] = stamp_;
    Set kept;
    while (!nodes.empty()) {
      const uint32_t node = nodes.back();
      nodes.pop_back();
      budget_.spend(1 + first_[node + 1] - first_[node]);
      bool takes = is_end_[node];
      for (uint32_t i = first_[node]; i < first_[node + 1]; i++) {
        const GraphEdge& edge = edges_[i];
        takes = takes || edge.low != kEmptyLabel;
        if (edge.low != kEmptyLabel || seen_[edge.to] == stamp_) continue;
        seen_[edge.to] = stamp_;
        nodes.push_back(edge.to);
      }
      if (takes) kept.push_back(node);
    }
    std::sort(kept.begin(), kept.end());
    budget_.spend(2 * kept.size());
    const auto [found, is_new] = states_.try_emplace(kept, uint32_t(sets_.size()));
    if (is_new) {
      if (sets_.size() >= kMostStates) throw BuildError::kTooLarge;
      machine_.finals.push_back(std::any_of(kept.begin(), kept.end(), [&](uint32_t node) { return is_end_[node]; }));
      machine_.steps.emplace_back();
      sets_.push_back(std::move(kept));
    }
    return found->second;
  }

  void expand(uint32_t state) {
    std::map<uint32_t, Set> targets;
    for (const uint32_t node : Set(sets_[state])) {
      for (uint32_t i = first_[node]; i < first_[node + 1]; i++) {
        const GraphEdge& edge = edges_[i];
        if (edge.low == kEmptyLabel) continue;
        const bool is_rule = edge.low == kRuleLabel;
        const uint32_t low = is_rule ? machine_.num_intervals + edge.high : machine_.interval_of(edge.low);
        const uint32_t high = is_rule ? low : machine_.interval_of(edge.high);
        budget_.spend(4 * (high - low + 1));
        for (uint32_t label = low; label <= high; label++) targets[label].push_back(edge.to);
      }
    }
    std::map<Set, uint32_t> known;  // neighbouring intervals often lead to the same
    for (auto& [label, nodes] : targets) {
      std::sort(nodes.begin(), nodes.end());
      nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
      auto found = known.find(nodes);
      if (found == known.end()) found = known.emplace(nodes, state_of(nodes)).first;
      machine_.steps[state].push_back({label, found->second});
    }
  }

  std::vector<GraphEdge> edges_;  // by their nodes
  std::vector<GraphRule> rules_;
  std::vector<uint32_t> first_, seen_;
  std::vector<bool> is_end_;
  uint32_t stamp_ = 0;
  std::unordered_map<Set, uint32_t, Hash> states_;
  std::vector<Set> sets_;
  Machine machine_;
  Budget& budget_;
};

}  // namespace blink
