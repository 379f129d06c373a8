// SPDX-License-Identifier: Apache-2.0
// The plan word: all that the first rank's scheduler tells another GPU of a launch. It is stored at once, so that none
// is ever seen half, and the batch that it is for is there before it.
#pragma once

#include "scheduler/step_kind.h"

namespace blink {

constexpr uint32_t kEndOfPlans = 0xffff;  // in place of a graph: nothing more comes

struct Plan {
  uint32_t step;     // the launch's number, its lower half: each differs from the one before
  uint32_t graph;    // kEndOfPlans: there is none
  uint32_t segment;  // kNone: the whole step
};

BLINK_FN uint64_t pack_plan(Plan plan) {
  return uint64_t(plan.step) << 32 | uint64_t(plan.graph) << 16 | uint16_t(plan.segment + 1);
}

BLINK_FN Plan unpack_plan(uint64_t word) {
  return {uint32_t(word >> 32), uint32_t(word >> 16) & 0xffff, (uint32_t(word) & 0xffff) - 1};
}

}  // namespace blink
