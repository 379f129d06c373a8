// SPDX-License-Identifier: Apache-2.0
// Regular languages over code points, as minimal deterministic machines: built from a graph, and combined. Host only.
//
// A language is written as words: num_states, num_edges, whether each state is final, and edges {from, low, high, to},
// by their states. It begins in state 0; a language without states has no text.
#pragma once

#include <map>

#include "automaton/minimize.h"
#include "automaton/subsets.h"
#include "automaton/trim.h"

namespace blink {

// What the last language of this thread has taken, in the units of Budget.
inline thread_local uint64_t language_work = 0;

enum class LanguageOp : uint32_t { kAnd = 0, kOr = 1, kMinus = 2 };

// A language that is read from its words.
class LanguageView {
 public:
  explicit LanguageView(const uint32_t* words)
      : num_states_(words[0]),
        num_edges_(words[1]),
        finals_(words + 2),
        edges_(reinterpret_cast<const GraphEdge*>(words + 2 + words[0])) {
    first_.assign(num_states_ + 1, 0);
    for (uint32_t i = 0; i < num_edges_; i++) first_[edges_[i].from + 1]++;
    for (uint32_t state = 0; state < num_states_; state++) first_[state + 1] += first_[state];
  }

  uint32_t start() const { return num_states_ > 0 ? 0 : kNowhere; }
  bool is_final(uint32_t state) const { return state != kNowhere && finals_[state]; }
  const GraphEdge* begin(uint32_t state) const { return state == kNowhere ? edges_ : edges_ + first_[state]; }
  const GraphEdge* end(uint32_t state) const { return state == kNowhere ? edges_ : edges_ + first_[state + 1]; }
  const GraphEdge* all_begin() const { return edges_; }
  const GraphEdge* all_end() const { return edges_ + num_edges_; }
  // Where a state goes by each symbol of an interval that no edge of it tells apart.
  uint32_t next(uint32_t state, uint32_t symbol) const {
    const GraphEdge* found = std::upper_bound(begin(state), end(state), symbol,
                                              [](uint32_t value, const GraphEdge& edge) { return value < edge.low; });
    return found != begin(state) && symbol <= found[-1].high ? found[-1].to : kNowhere;
  }

 private:
  uint32_t num_states_, num_edges_;
  const uint32_t* finals_;
  const GraphEdge* edges_;
  std::vector<uint32_t> first_;
};

// Write a machine without calls as a language's words.
inline std::vector<uint32_t> write_language(Machine machine, Budget& budget) {
  try {
    machine = Trim(std::move(machine), budget).run();
  } catch (const BuildError error) {
    language_work = budget.used();
    if (error == BuildError::kEmpty) return {0, 0};
    throw;
  }
  machine = Minimize(machine, budget).run();
  const auto low_of = [&](uint32_t label) { return label < machine.lows.size() ? machine.lows[label] : kCodePoints; };
  std::vector<uint32_t> order{machine.starts[0]}, places(machine.size(), kNowhere);
  places[machine.starts[0]] = 0;
  std::vector<GraphEdge> edges;
  for (uint32_t place = 0; place < order.size(); place++) {
    auto steps = machine.steps[order[place]];
    std::sort(steps.begin(), steps.end(), [](auto& a, auto& b) { return a.label < b.label; });
    const size_t first = edges.size();
    for (const Step& step : steps) {
      if (places[step.to] == kNowhere) {
        places[step.to] = uint32_t(order.size());
        order.push_back(step.to);
      }
      const GraphEdge edge{place, low_of(step.label), low_of(step.label + 1) - 1, places[step.to]};
      if (edges.size() > first && edges.back().to == edge.to && edges.back().high + 1 == edge.low)
        edges.back().high = edge.high;
      else
        edges.push_back(edge);
    }
  }
  std::vector<uint32_t> words{uint32_t(order.size()), uint32_t(edges.size())};
  for (const uint32_t state : order) words.push_back(machine.finals[state]);
  for (const GraphEdge& edge : edges) words.insert(words.end(), {edge.from, edge.low, edge.high, edge.to});
  language_work = budget.used();
  return words;
}

inline std::vector<uint32_t> build_language(const Graph& graph) {
  Budget budget(kWorkOfLanguage);
  return write_language(Subsets(graph, kCodePoints, budget).run(), budget);
}

// The texts of both, of one or both, or of the first alone.
class Product {
 public:
  Product(const uint32_t* one, const uint32_t* other, LanguageOp op) : one_(one), other_(other), op_(op) {}

  std::vector<uint32_t> run() {
    find_intervals();
    machine_.starts.push_back(state_of({one_.start(), other_.start()}));
    for (uint32_t state = 0; state < pairs_.size(); state++) expand(state);
    return write_language(std::move(machine_), budget_);
  }

 private:
  using Pair = std::pair<uint32_t, uint32_t>;
  static constexpr uint32_t kMostStates = 30'000;

  void find_intervals() {
    std::vector<uint32_t>& lows = machine_.lows;
    lows.push_back(0);
    for (const LanguageView* view : {&one_, &other_})
      for (const GraphEdge* edge = view->all_begin(); edge != view->all_end(); edge++)
        lows.insert(lows.end(), {edge->low, edge->high + 1});
    std::sort(lows.begin(), lows.end());
    lows.erase(std::unique(lows.begin(), lows.end()), lows.end());
    while (lows.back() >= kCodePoints) lows.pop_back();
    machine_.num_intervals = uint32_t(lows.size());
  }

  bool is_dead(const Pair& pair) const {
    if (op_ == LanguageOp::kAnd) return pair.first == kNowhere || pair.second == kNowhere;
    return pair.first == kNowhere && (op_ == LanguageOp::kMinus || pair.second == kNowhere);
  }

  uint32_t state_of(const Pair& pair) {
    const auto [found, is_new] = states_.try_emplace(pair, uint32_t(pairs_.size()));
    if (is_new) {
      if (pairs_.size() >= kMostStates) throw BuildError::kTooLarge;
      pairs_.push_back(pair);
      const bool one = one_.is_final(pair.first), other = other_.is_final(pair.second);
      machine_.finals.push_back(op_ == LanguageOp::kAnd  ? one && other
                                : op_ == LanguageOp::kOr ? one || other
                                                         : one && !other);
      machine_.steps.emplace_back();
    }
    return found->second;
  }

  void expand(uint32_t state) {
    const Pair pair = pairs_[state];
    std::vector<uint32_t> cuts;
    for (const GraphEdge* edge = one_.begin(pair.first); edge != one_.end(pair.first); edge++)
      cuts.insert(cuts.end(), {edge->low, edge->high + 1});
    for (const GraphEdge* edge = other_.begin(pair.second); edge != other_.end(pair.second); edge++)
      cuts.insert(cuts.end(), {edge->low, edge->high + 1});
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    for (size_t i = 0; i + 1 < cuts.size(); i++) {
      const Pair next{one_.next(pair.first, cuts[i]), other_.next(pair.second, cuts[i])};
      if (is_dead(next)) continue;
      const uint32_t to = state_of(next);
      const uint32_t low = machine_.interval_of(cuts[i]), high = machine_.interval_of(cuts[i + 1] - 1);
      budget_.spend(4 + high - low);
      for (uint32_t label = low; label <= high; label++) machine_.steps[state].push_back({label, to});
    }
  }

  LanguageView one_, other_;
  LanguageOp op_;
  Budget budget_{kWorkOfLanguage};
  Machine machine_;
  std::map<Pair, uint32_t> states_;
  std::vector<Pair> pairs_;
};

}  // namespace blink
