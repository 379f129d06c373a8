// SPDX-License-Identifier: Apache-2.0
// Copies adapters to the model's slots for sequences that wait for them. One copy is in flight at a time, and steps run
// meanwhile: a slot that it goes to has no sequence in a step.
#pragma once

#include "scheduler/admission.h"

namespace blink {

// For so long a copy that no sequence has used yet stays for who waited for it.
constexpr uint64_t kKeepCopyNs = 1'000'000'000;

// Whether a slot can be another adapter's: it is empty, or nobody uses or awaits what it holds.
BLINK_FN bool is_adapter_slot_free(const State& s, uint32_t slot, uint64_t now) {
  const int32_t place = s.adapter_places[slot];
  if (place == 0) return true;
  const AdapterUse& use = s.adapters[place - 1];
  return use.num_in_slots == 0 && (use.num_users == 0 || use.kept_until_ns <= now);
}

// The slot that was not used for the longest time, of those that are free; kNone: none is.
BLINK_FN uint32_t oldest_adapter_slot(const State& s, uint64_t now) {
  uint32_t best = kNone;
  for (uint32_t slot = 0; slot < s.geometry.num_adapter_slots; slot++)
    if (is_adapter_slot_free(s, slot, now) && (best == kNone || s.adapter_stamps[slot] < s.adapter_stamps[best]))
      best = slot;
  return best;
}

// Order a copy of a sequence's adapter, if there is a slot for it. Runs on: one lane.
template <class Env>
BLINK_FN void order_copy(Env& env, State& s, const Sequence& q, uint64_t now) {
  const uint32_t slot = oldest_adapter_slot(s, now);
  if (slot == kNone) return;
  if (const int32_t before = s.adapter_places[slot]; before > 0) s.adapters[before - 1].slot = 0;
  s.adapter_places[slot] = int32_t(q.sqe.adapter);
  s.adapter_stamps[slot] = ++s.adapter_stamp;
  AdapterUse& use = s.adapters[q.sqe.adapter - 1];
  use.slot = slot + 1;
  use.kept_until_ns = now + kKeepCopyNs;
  s.copied_adapter = q.sqe.adapter;
  CopyOrder& copy = *s.copy_order;
  copy.source = q.sqe.adapter - 1;
  copy.target = slot;
  copy.ordered++;
  if (!env.copy(copy)) fail(s, ErrorCode::kLaunchFailed, BLINK_HERE, copy.source);
}

// Note a copy that is over, and order the next one: for the first sequence that could run if it had its adapter. Where
// copies take no time, as many as there are slots for.
template <class Env>
BLINK_RARE_FN void page_adapters(Env& env, State& s, uint64_t now) {
  if (s.geometry.num_adapters == 0 || s.num_waiting == 0) return;
  for (uint32_t slot = 0; slot <= s.geometry.num_adapter_slots && !s.failed; slot++) {
    env.sync();
    if (env.lane() == 0) end_copy(s);
    env.sync();
    if (s.copied_adapter > 0) return;
    const Rank first = first_of(env, s, s.waiting, s.num_waiting, now,
                                [&](const Sequence& q) { return lacks_adapter(s, q) && may_be_next(s, q, now); });
    if (first.sequence == kNone) return;
    if (env.lane() == 0) order_copy(env, s, s.sequences[first.sequence], now);
    env.sync();
    if (s.copied_adapter == 0) return;
  }
}

}  // namespace blink
