// SPDX-License-Identifier: Apache-2.0
// The scheduler on several lanes behind a C API, for tests that compare its decisions with those of one lane.
#include "team.h"

extern "C" {
blink::Lanes* lanes_start(uint32_t count) { return new blink::Lanes(count); }
uint32_t lanes_step(blink::Lanes* lanes, blink::State* state, uint64_t now_ns) {
  return uint32_t(lanes->step(*state, now_ns));
}
void lanes_stop(blink::Lanes* lanes) { delete lanes; }
}
