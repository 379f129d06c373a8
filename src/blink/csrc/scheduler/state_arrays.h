// SPDX-License-Identifier: Apache-2.0
// Lays out the arrays of the scheduler's state. Host only: the state is built here and then used where it lives.
#pragma once

#include "scheduler/state.h"

namespace blink {

constexpr uint64_t kArrayAlignment = 256;

// Call visit(name, pointer, offset, count) for every array of the state that lies at `offset` behind its start, in
// memory order, and return the bytes used.
template <class Visit>
uint64_t place_arrays(State& state, const Geometry& geometry, Visit visit) {
  uint64_t offset = align_up(sizeof(State), kArrayAlignment);
  const auto place = [&]<class T>(const char* name, T*& pointer, uint64_t count) {
    visit(name, pointer, offset, count);
    offset = align_up(offset + count * sizeof(T), kArrayAlignment);
  };
  visit_arrays(state, geometry, place);
  return offset;
}

// Lay out every array behind `base`, the address that the scheduler sees. Returns the bytes used.
inline uint64_t lay_out_arrays(State& state, const Geometry& geometry, uint64_t base) {
  return place_arrays(state, geometry, [&]<class T>(const char*, T*& pointer, uint64_t offset, uint64_t) {
    pointer = reinterpret_cast<T*>(base + offset);
  });
}

// Point the state at the region as the scheduler sees it.
inline void bind_region(State& state, const Geometry& geometry, uint64_t region) {
  const RegionLayout layout = region_layout(geometry);
  visit_region(state, layout,
               [&]<class T>(T*& words, uint64_t offset) { words = reinterpret_cast<T*>(region + offset); });
  const KvEventLayout events = kv_event_layout(geometry.num_kv_events, geometry.block_size);
  state.events.ring = reinterpret_cast<KvEvent*>(region + layout.kv_events + events.events);
  state.events.tokens = reinterpret_cast<int32_t*>(region + layout.kv_events + events.tokens);
  state.queue_pair = layout.queue_pair;
}

}  // namespace blink
