// SPDX-License-Identifier: Apache-2.0
// From the graph of a grammar to its automaton, within bounds of work and size that no grammar can exceed. Host only.
#pragma once

#include "automaton/minimize.h"
#include "automaton/subsets.h"
#include "automaton/table.h"
#include "automaton/trim.h"

namespace blink {

struct Graph {
  const GraphEdge* edges;
  uint32_t num_edges, num_nodes;
  const GraphRule* rules;
  uint32_t num_rules;
};

// Write the automaton to `out` (kMaxAutomatonBytes); returns its bytes, or a BuildError.
inline int32_t build_automaton(const Graph& graph, uint8_t* out) {
  try {
    Budget budget;
    Machine machine =
        Subsets(graph.edges, graph.num_edges, graph.num_nodes, graph.rules, graph.num_rules, budget).run();
    machine = Trim(std::move(machine), budget).run();
    machine = Minimize(machine, budget).run();
    const std::string bytes = Table(machine, graph.rules, graph.num_rules, budget).bytes();
    std::memcpy(out, bytes.data(), bytes.size());
    return int32_t(bytes.size());
  } catch (const BuildError error) {
    return int32_t(error);
  } catch (const std::bad_alloc&) {
    return int32_t(BuildError::kTooLarge);
  }
}

}  // namespace blink
