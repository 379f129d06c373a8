// SPDX-License-Identifier: Apache-2.0
// How the scheduler stops when an invariant is broken: a code, and the line of the source that saw it.
#pragma once

#include "scheduler/state.h"

namespace blink {

// The files that report failures.
constexpr const char* kFailureFiles[] = {"compose.h",   "hash_table.h",        "kv_cache.h",      "retire.h",
                                         "scheduler.h", "scheduler_kernel.cu", "adapter_paging.h"};

// A place in them, as Control::error_place holds it.
struct Place {
  FIELDS_OF(Place);
  FIELD(uint16_t, line);
  FIELD(uint16_t, file);  // index of kFailureFiles
};

// A path that ends in no name of the list does not compile.
BLINK_FN consteval uint32_t place_of(const char* path, uint32_t line) {
  const char* name = path;
  for (const char* c = path; *c != 0; c++)
    if (*c == '/') name = c + 1;
  uint32_t file = 0;
  for (;; file++) {
    const char* known = kFailureFiles[file];
    uint32_t i = 0;
    while (known[i] != 0 && known[i] == name[i]) i++;
    if (known[i] == name[i]) return __builtin_bit_cast(uint32_t, Place{uint16_t(line), uint16_t(file)});
  }
}
#define BLINK_HERE ::blink::place_of(__FILE__, __LINE__)

BLINK_RARE_FN void fail(State& s, ErrorCode code, uint32_t place, uint32_t detail) {
  if (s.failed) return;
  s.failed = 1;
  s.engine_state = uint32_t(EngineState::kFailed);
  s.control->error_place = place;
  s.control->error_detail = detail;
  store_release(s.control->error_code, uint32_t(code));
  store_release(s.control->state, uint32_t(EngineState::kFailed));
}

}  // namespace blink
