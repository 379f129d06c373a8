// SPDX-License-Identifier: Apache-2.0
// The invariants of adapters, checked from scratch. Host only.
#pragma once

#include <vector>

#include "scheduler/adapters.h"

namespace blink {

// First broken invariant of the sequences' adapters, or null. Counts the users of each and in how many slots it is.
inline const char* count_adapters(const State& s, std::vector<uint32_t>& users, std::vector<uint32_t>& in_slots) {
  for (uint32_t i = 0; i < s.geometry.num_queue_pairs * s.geometry.sequences_per_queue_pair; i++) {
    const Sequence& q = s.sequences[i];
    if (q.status == SequenceStatus::kFree || q.sqe.adapter == 0) continue;
    const AdapterUse& use = s.adapters[q.sqe.adapter - 1];
    if (use.generation != q.sqe.adapter_generation) return "an adapter in use was taken back";
    if ((q.slot != kNone) != (q.adapter_slot > 0)) return "a sequence with a slot lacks its adapter";
    if (q.adapter_slot > 0 && q.adapter_slot != use.slot) return "a sequence's adapter is in another slot";
    if (q.adapter_slot > 0 && q.sqe.adapter == s.copied_adapter) return "a sequence runs before its adapter is there";
    users[q.sqe.adapter - 1]++;
    in_slots[q.sqe.adapter - 1] += q.adapter_slot > 0;
  }
  return nullptr;
}

// First broken invariant of adapters, or null: users are counted, and a slot and its adapter name each other.
inline const char* check_adapters(const State& s) {
  std::vector<uint32_t> users(s.geometry.num_adapters), in_slots(users.size());
  if (const char* broken = count_adapters(s, users, in_slots)) return broken;
  for (uint32_t i = 0; i < users.size(); i++) {
    const AdapterUse& use = s.adapters[i];
    if (use.num_users != users[i] || use.num_in_slots != in_slots[i]) return "an adapter's users are miscounted";
    if (use.slot > 0 && s.adapter_places[use.slot - 1] != int32_t(i + 1)) return "an adapter's slot is another's";
  }
  for (uint32_t slot = 0; slot < s.geometry.num_adapter_slots; slot++)
    if (const int32_t place = s.adapter_places[slot]; place > 0 && s.adapters[place - 1].slot != slot + 1)
      return "a slot's adapter is elsewhere";
  return nullptr;
}

}  // namespace blink
