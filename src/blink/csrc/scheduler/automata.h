// SPDX-License-Identifier: Apache-2.0
// The automata that the engine holds. One is copied out of an arena and checked when a sequence first needs it. All
// that name it on the same queue pair share it. It stays until its entry is needed.
//
// An entry cannot be taken back while a sequence uses its automaton, however long the answer. So a flow takes another
// one only while it has fewer than are free. Alone it has half of them, and whoever comes finds some: the dynamic
// thresholds of Choudhury and Hahne, 1998. A shared automaton takes an entry of one of its users' flows.
#pragma once

#include "scheduler/policy.h"
#include "scheduler/queue_pair.h"

namespace blink {

BLINK_FN bool is_automaton(const State& s, const AutomatonEntry& entry, const Sequence& q) {
  bool is_it = entry.owner == s.qps[q.queue_pair].attached && entry.queue_pair == q.queue_pair;
  const auto* known = reinterpret_cast<const uint32_t*>(entry.hash);
  const auto* wanted = reinterpret_cast<const uint32_t*>(q.sqe.automaton_hash);
  for (uint32_t i = 0; i < kAutomatonHashBytes / 4; i++) is_it &= known[i] == wanted[i];
  return is_it;
}

// What may be copied of automata while one step is composed, but for a first one, which may be larger. Whoever brings
// more waits for the next step, so that nobody holds up the others' tokens by it.
constexpr uint32_t kAutomatonBytesOfPass = 128 << 10;

// Whether a waiting sequence's automaton is in use, or its flow may take a place for it, and it is here or may be
// copied now.
BLINK_RARE_FN bool has_automaton_room(const State& s, const Sequence& q) {
  const uint32_t bytes = q.sqe.automaton_bytes;
  if (bytes == 0 || q.slot != kNone) return true;
  const bool has_time = s.automaton_bytes_copied == 0 || s.automaton_bytes_copied + bytes <= kAutomatonBytesOfPass;
  const bool has_place = flow_of(s, q).num_automata < s.geometry.num_automata - s.num_automata_used;
  if (has_time && has_place) return true;
  bool is_here = false;  // without branches, for many sequences may ask
  for (uint32_t i = 0; i < s.geometry.num_automata; i++) {
    const AutomatonEntry& entry = s.automaton_entries[i];
    is_here |= (has_place | (entry.num_users > 0)) & is_automaton(s, entry, q);
  }
  return is_here;
}

// Whether an entry of a row leads nowhere else than to a state, to a call or to none. Without branches: most words of
// an automaton are two of them.
BLINK_FN bool valid_entry(const AutomatonHeader& h, uint32_t entry) {
  return bool((entry < num_states(h)) | (entry == kDeadEntry) | (entry - kCallEntry < h.num_calls));
}

// Whether a word of an automaton leads out of none of its tables.
BLINK_FN bool valid_automaton_word(const AutomatonHeader& h, const AutomatonLayout& l, uint32_t at, uint32_t word) {
  const uint32_t low = word & 0xffff, high = word >> 16;
  const auto all_bytes = [&](uint32_t mask, uint32_t most) {
    bool valid = true;
    for (uint32_t shift = 0; shift < 32; shift += 8) valid = valid && (word >> shift & mask) <= most;
    return valid;
  };
  if (at >= l.guesses) return true;
  if (at >= l.traits) return all_bytes(kNeedOfTrait, kMaxNeed);
  if (at >= l.patterns) return all_bytes(0xff, kNoMappedEntry);
  if (at >= l.single) return valid_entry(h, low);  // classes are compared only
  if (at >= l.sparse) {
    const uint32_t part = (at - l.sparse) / 4 % 4;
    return part == 3 || (valid_entry(h, low) && (part == 2 || valid_entry(h, high)));
  }
  if (at >= l.mapped) {
    const bool has_pattern = (at - l.mapped) % sizeof(MappedRow) == 0;
    return (has_pattern ? low < h.num_patterns : valid_entry(h, low)) && valid_entry(h, high);
  }
  if (at < l.calls) return all_bytes(0xff, h.num_classes - 1u);
  if (at < l.full) {
    const uint32_t mark = h.start & kMark;
    return (low & ~mark) < num_states(h) && (high & ~mark) < num_states(h);
  }
  return valid_entry(h, low) && valid_entry(h, high);
}

struct alignas(16) AutomatonQuad {
  Word words[4];
};

// Quads that a lane has on their way at once: what is far away takes as long for all of them as for one.
constexpr uint32_t kQuadsInFlight = 8;

// How many words of a quad at byte `at` lead out of their tables.
BLINK_FN uint32_t count_bad_words(const AutomatonHeader& h, const AutomatonLayout& l, uint32_t at,
                                  const AutomatonQuad& quad) {
  uint32_t bad = 0;
  if (at >= l.full && at + sizeof(AutomatonQuad) <= l.mapped) {
    for (uint32_t n = 0; n < 4; n++) {
      const uint32_t word = quad.words[n];
      bad += !(valid_entry(h, word & 0xffff) & valid_entry(h, word >> 16));
    }
    return bad;
  }
  for (uint32_t n = 0; n < 4; n++) bad += !valid_automaton_word(h, l, at + 4 * n, quad.words[n]);
  return bad;
}

// Copy an automaton out of the arena; false if it is none. Each word is read once: its frontend may still change it.
template <class Env>
BLINK_RARE_FN bool copy_automaton(Env& env, State& s, const Sequence& q, uint32_t index) {
  const auto* from = reinterpret_cast<const AutomatonQuad*>(arena(s, q.queue_pair) + q.sqe.automaton_offset);
  auto* to = reinterpret_cast<AutomatonQuad*>(s.automata + uint64_t(index) * kMaxAutomatonBytes);
  AutomatonQuad first{};
  if (env.lane() == 0) first = from[0];
  first = env.share(first);
  const auto header = __builtin_bit_cast(AutomatonHeader, first);
  if (!valid_header(header)) return false;
  const AutomatonLayout layout = automaton_layout(header);
  if (layout.bytes != q.sqe.automaton_bytes) return false;
  if (env.lane() == 0) to[0] = first;
  constexpr uint32_t kSize = sizeof(AutomatonQuad);
  const uint32_t count = layout.bytes / kSize;
  uint32_t bad = 0;
  for (uint32_t tile = 1 + env.lane(); tile < count; tile += env.lanes() * kQuadsInFlight) {
    AutomatonQuad quads[kQuadsInFlight];
    const uint32_t left = count - tile;
    for (uint32_t i = 0; i < kQuadsInFlight; i++)
      if (i * env.lanes() < left) quads[i] = (from + tile)[i * env.lanes()];
    for (uint32_t i = 0; i < kQuadsInFlight; i++) {
      if (i * env.lanes() >= left) continue;
      bad += count_bad_words(header, layout, (tile + i * env.lanes()) * kSize, quads[i]);
      (to + tile)[i * env.lanes()] = quads[i];
    }
  }
  return env.sum(bad) == 0;
}

// The entry that has the sequence's automaton, else the one that it may take: the longest unused. kNone: all are in
// use.
template <class Env>
BLINK_FN uint32_t find_automaton(Env& env, const State& s, const Sequence& q, bool& is_here) {
  constexpr uint64_t kNowhere = ~uint64_t(0);
  uint64_t best = kNowhere;
  for (uint32_t i = env.lane(); i < s.geometry.num_automata; i += env.lanes()) {
    const AutomatonEntry& entry = s.automaton_entries[i];
    const uint64_t stamp = entry.owner == 0 ? 0 : uint64_t(entry.stamp);
    if (is_automaton(s, entry, q))
      best = i;
    else if (entry.num_users == 0)
      best = least(best, (stamp + 1) << 32 | i);
  }
  best = env.least(best);
  is_here = best >> 32 == 0;
  return best == kNowhere ? kNone : uint32_t(best);
}

// Let an automaton take a place of a flow that has so many of its users. Runs on: one lane.
BLINK_FN void give_place(State& s, AutomatonEntry& entry, uint32_t flow, uint32_t num_own) {
  entry.flow = flow;
  entry.num_own = num_own;
  s.flows[flow].num_automata++;
}

// Let a sequence with a slot use its automaton. False if that is broken.
template <class Env>
BLINK_RARE_FN bool take_automaton(Env& env, State& s, Sequence& q) {
  if (env.lane() == 0) {
    q.automaton = kNone;
    const uint32_t count = lists_of_slot(s.geometry);
    for (uint32_t i = 0; i < count; i++) s.automaton_places[q.slot * count + i].num_generated = kNoPlace;
  }
  if (q.sqe.automaton_bytes == 0) return true;
  bool is_here = false;
  const uint32_t index = find_automaton(env, s, q, is_here);
  if (index == kNone) return false;  // can_admit() has seen to it that there is one
  const bool is_valid = is_here || copy_automaton(env, s, q, index);
  env.sync();
  if (env.lane() == 0) {
    AutomatonEntry& entry = s.automaton_entries[index];
    entry.queue_pair = q.queue_pair;
    entry.owner = is_valid ? s.qps[q.queue_pair].attached : 0;
    entry.stamp = ++s.automaton_stamp;
    if (!is_here) s.automaton_bytes_copied += q.sqe.automaton_bytes;
    for (uint32_t i = 0; i < kAutomatonHashBytes; i++) entry.hash[i] = q.sqe.automaton_hash[i];
    if (is_valid) {
      q.automaton = index;
      if (entry.num_users++ == 0) {
        s.num_automata_used++;
        give_place(s, entry, flow_index(q), 0);
      }
      entry.num_own += entry.flow == flow_index(q);
      s.statistics.automata_loaded += !is_here;
    }
  }
  env.sync();
  return is_valid;
}

// Among the sequences that use an automaton: those whose flow is the first of all.
struct Heirs {
  uint32_t flow, count;  // kNone and 0: nobody uses it
};
template <class Env>
BLINK_RARE_FN Heirs find_heirs(Env& env, const State& s, uint32_t index) {
  const auto flow_at = [&](uint32_t i) {
    const Sequence& q = s.sequences[i < s.num_running ? s.running[i] : s.waiting[i - s.num_running]];
    return q.automaton == index ? flow_index(q) : kNone;
  };
  Heirs heirs{kNone, 0};
  const uint32_t count = s.num_running + s.num_waiting;
  for (uint32_t i = env.lane(); i < count; i += env.lanes()) heirs.flow = least(heirs.flow, flow_at(i));
  heirs.flow = env.least(heirs.flow);
  for (uint32_t i = env.lane(); i < count; i += env.lanes())
    heirs.count += heirs.flow != kNone && flow_at(i) == heirs.flow;
  heirs.count = env.sum(heirs.count);
  return heirs;
}

// Let a sequence that gives its slot back no longer use its automaton. The last of the flow whose place that takes
// leaves it to another user's.
template <class Env>
BLINK_RARE_FN void release_automaton(Env& env, State& s, Sequence& q) {
  const uint32_t index = q.automaton;
  if (index == kNone) return;
  AutomatonEntry& entry = s.automaton_entries[index];
  env.sync();
  if (env.lane() == 0) {
    q.automaton = kNone;
    s.num_automata_used -= --entry.num_users == 0;
    if (entry.flow == flow_index(q) && --entry.num_own == 0) s.flows[entry.flow].num_automata--;
  }
  env.sync();
  if (entry.num_own > 0 || entry.num_users == 0) return;
  const Heirs heirs = find_heirs(env, s, index);
  if (env.lane() == 0) give_place(s, entry, heirs.flow, heirs.count);
  env.sync();
}

}  // namespace blink
