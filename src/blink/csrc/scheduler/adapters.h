// SPDX-License-Identifier: Apache-2.0
// Adapters (LoRA): which of them sequences may use, and which of them the model holds a copy of.
//
// The engine's host process stores an adapter's generation once its weights are in memory, and 0 to take it back. The
// scheduler follows, by `seen`, as soon as nobody uses the generation before. So the host waits for `seen` twice:
// before it tells anybody of an adapter, and before it frees the memory of one. Entries name index and generation;
// those of others than `seen` are refused.
//
// The model reads an adapter in one of its own slots. A copy goes there when a sequence first waits for it, one at a
// time, while steps run (adapter_paging.h). It stays, without users too, until another adapter takes its slot.
#pragma once

#include "scheduler/queue_pair.h"

namespace blink {

// Tell the host how an adapter is used. Runs on: one lane.
BLINK_FN void publish_use(State& s, uint32_t index) {
  store_relaxed(s.adapter_words[index].num_users, s.adapters[index].num_users);
  store_relaxed(s.adapter_words[index].num_in_slots, s.adapters[index].num_in_slots);
}

// Whether the copy that is in flight, as far as is known, is over.
BLINK_FN bool is_copy_over(const State& s) {
  return s.copied_adapter > 0 && load_acquire(s.copy_order->done) == load_relaxed(s.copy_order->ordered);
}

// Note the end of a copy. Runs on: one lane.
BLINK_FN void end_copy(State& s) {
  if (is_copy_over(s)) s.copied_adapter = 0;
}

// Follow what the host has loaded and taken back. Runs on: one lane.
// Orders: `generation` (acquire) before `content`; the last user's end before `seen` (release).
BLINK_FN void follow_adapters(State& s) {
  end_copy(s);
  for (uint32_t i = 0; i < s.geometry.num_adapters; i++) {
    AdapterUse& use = s.adapters[i];
    const uint32_t generation = load_acquire(s.adapter_words[i].generation);
    if (generation == use.generation || use.num_users > 0 || s.copied_adapter == i + 1) continue;
    if (use.slot > 0) s.adapter_places[use.slot - 1] = 0;
    use = AdapterUse{0, generation, load_relaxed(s.adapter_words[i].content), 0, 0, 0};
    store_release(s.adapter_words[i].seen, generation);
  }
}

// Whether the adapter that an entry names is there, and is to stay.
BLINK_FN bool may_use_adapter(const State& s, const Sqe& e) {
  if (e.adapter == 0) return true;
  if (e.adapter > s.geometry.num_adapters) return false;
  const uint32_t index = e.adapter - 1, generation = e.adapter_generation;
  return generation != 0 && generation == s.adapters[index].generation &&
         generation == load_acquire(s.adapter_words[index].generation);
}

// Count a sequence that came among its adapter's users. Runs on: one lane.
BLINK_FN void join_adapter(State& s, const Sequence& q) {
  if (q.sqe.adapter == 0) return;
  const uint32_t index = q.sqe.adapter - 1;
  s.adapters[index].num_users++;
  publish_use(s, index);
  store_relaxed(s.adapter_words[index].last_use, ++s.adapter_stamp);
}

// Whether a sequence waits for a copy of its adapter.
BLINK_FN bool lacks_adapter(const State& s, const Sequence& q) {
  return q.sqe.adapter > 0 && q.adapter_slot == 0 &&
         (s.adapters[q.sqe.adapter - 1].slot == 0 || s.copied_adapter == q.sqe.adapter);
}

// Let a sequence that gets a slot have the copy of its adapter, which is there. Runs on: one lane.
BLINK_FN void take_adapter(State& s, Sequence& q) {
  if (q.sqe.adapter == 0) return;
  const uint32_t index = q.sqe.adapter - 1;
  AdapterUse& use = s.adapters[index];
  s.adapter_stamps[use.slot - 1] = ++s.adapter_stamp;
  use.kept_until_ns = 0;
  q.adapter_slot = use.slot;
  use.num_in_slots++;
  publish_use(s, index);
}

// What the chain of a sequence's blocks begins with.
BLINK_FN uint32_t content_of(const State& s, const Sequence& q) {
  return q.sqe.adapter == 0 ? 0 : s.adapters[q.sqe.adapter - 1].content;
}

// Let a sequence that ends no longer use its adapter. Runs on: one lane.
BLINK_FN void leave_adapter(State& s, Sequence& q) {
  if (q.sqe.adapter == 0) return;
  AdapterUse& use = s.adapters[q.sqe.adapter - 1];
  use.num_users--;
  use.num_in_slots -= q.adapter_slot > 0;
  q.adapter_slot = 0;
  publish_use(s, q.sqe.adapter - 1);
}

}  // namespace blink
