// SPDX-License-Identifier: Apache-2.0
// From the graph of a grammar to its automaton or language, within bounds of work and size that none can exceed. Host
// only.
#pragma once

#include "automaton/language.h"
#include "automaton/table.h"

namespace blink {

// Write the automaton to `out` (kMaxAutomatonBytes); returns its bytes, or a BuildError. Of an ambiguous grammar
// `is_in_conflict` (num_rules) says which rules' calls one byte does not decide.
inline int32_t build_automaton(const Graph& graph, uint8_t* out, uint8_t* is_in_conflict) {
  try {
    Budget budget(kWorkOfAutomaton);
    Machine machine = Subsets(graph, kBytes, budget).run();
    machine = Trim(std::move(machine), budget).run();
    machine = Minimize(machine, budget).run();
    const std::string bytes = Table(machine, graph, budget, is_in_conflict).bytes();
    std::memcpy(out, bytes.data(), bytes.size());
    return int32_t(bytes.size());
  } catch (const BuildError error) {
    return int32_t(error);
  } catch (const std::bad_alloc&) {
    return int32_t(BuildError::kTooLarge);
  }
}

// What the last call of keep_language() on this thread has made.
inline thread_local std::vector<uint32_t> made_language;

// Make a language and keep its words; returns their number, or a BuildError.
template <class Make>
int32_t keep_language(const Make& make) {
  try {
    made_language = make();
    return int32_t(made_language.size());
  } catch (const BuildError error) {
    return int32_t(error);
  } catch (const std::bad_alloc&) {
    return int32_t(BuildError::kTooLarge);
  }
}

}  // namespace blink
