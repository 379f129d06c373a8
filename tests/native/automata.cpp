// SPDX-License-Identifier: Apache-2.0
// Automata of any bits, checked as the scheduler checks them: those that pass are walked by any bytes, and may neither
// leave their memory, which the sanitizers watch, nor go on without end.
//
// automata COUNT SEED: prints how many passed; exit status 1 on a mismatch.
#include "scheduler/automata.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "automaton/walk.h"

using namespace blink;

namespace {

using Random = std::mt19937;

uint16_t entry(Random& random, const AutomatonHeader& h) {
  const uint32_t kind = random() % 8;
  if (kind < 4) return uint16_t(random() % num_states(h));
  if (kind < 6 && h.num_calls > 0) return uint16_t(kCallEntry + random() % h.num_calls);
  return uint16_t(kind == 6 && random() % 4000 == 0 ? random() : kDeadEntry);
}

// Tables that nearly always lead somewhere inside; in half of them are items that have to differ.
std::unique_ptr<uint8_t[]> make(Random& random, uint32_t& bytes) {
  AutomatonHeader h{};
  h.num_full = uint16_t(1 + random() % 12);
  for (uint16_t* count : {&h.num_mapped, &h.num_sparse, &h.num_single}) *count = uint16_t(random() % 12);
  h.num_classes = uint16_t(1 + random() % 20);
  h.num_calls = uint16_t(random() % 12);
  h.num_patterns = uint16_t(1 + random() % 4);
  const uint32_t mark = random() % 2 * kMark;
  h.start = uint16_t(random() % num_states(h) | mark);
  const AutomatonLayout l = automaton_layout(h);
  auto data = std::make_unique<uint8_t[]>(bytes = l.bytes);
  const auto put = [&](uint32_t at, const auto& value) { std::memcpy(&data[at], &value, sizeof value); };
  put(0, h);
  for (uint32_t i = 0; i < kBytes; i++) data[sizeof h + i] = uint8_t(random() % h.num_classes);
  for (uint32_t at = l.calls; at < l.calls + h.num_calls * sizeof(AutomatonCall); at += 2)
    put(at, uint16_t(random() % num_states(h) | (random() & mark)));
  for (uint32_t at = l.full; at < l.traits; at += 2) put(at, entry(random, h));
  for (uint32_t at = l.mapped; at < l.sparse; at += sizeof(MappedRow)) put(at, uint16_t(random() % h.num_patterns));
  for (uint32_t at = l.sparse; at < l.single; at += sizeof(SparseRow))
    for (uint32_t i = 0; i < kSparseClasses; i++) data[at + 10 + i] = uint8_t(random() % h.num_classes);
  for (uint32_t at = l.single; at < l.patterns; at += sizeof(SingleRow))
    data[at + 2] = uint8_t(random() % h.num_classes);
  for (uint32_t at = l.patterns; at < l.traits; at++) data[at] = uint8_t(random() % (kNoMappedEntry + 1));
  for (uint32_t i = 0; i < num_states(h); i++)
    data[l.traits + i] = uint8_t(random() % (kMaxNeed + 1) | (random() & ~kNeedOfTrait));
  if (random() % 4 == 0) put(uint32_t(random()) % (bytes / 4) * 4, uint32_t(random()));
  return data;
}

bool is_sound(const uint8_t* data, uint32_t bytes) {
  AutomatonHeader h;
  std::memcpy(&h, data, sizeof h);
  if (!valid_header(h)) return false;
  const AutomatonLayout l = automaton_layout(h);
  if (l.bytes != bytes) return false;
  for (uint32_t at = sizeof h; at < bytes; at += 4) {
    uint32_t word;
    std::memcpy(&word, data + at, 4);
    if (!valid_automaton_word(h, l, at, word)) return false;
  }
  return true;
}

// A text of random tokens through one automaton; returns how many bytes it took.
template <Items kItems>
uint32_t walk(Random& random, const Automaton& automaton) {
  AutomatonPlace places[2] = {};
  places[0].state = uint16_t(automaton.start);
  uint32_t taken = 0;
  for (uint32_t token = 0; token < 100; token++) {
    const AutomatonPlace& from = places[token % 2];
    AutomatonPlace& to = places[~token & 1];
    Pushes pushes;
    Walk<kItems> at(automaton, from, pushes, &to);
    bool goes_on = true;
    for (uint32_t n = random() % 20; n > 0 && goes_on; n--) taken += goes_on = at.take(uint8_t(random()));
    if (!goes_on) break;
    at.store(to);
    may_end(automaton, to);
    if (to.depth > kMaxAutomatonDepth || to.num_closed > kMaxUniqueItems) std::exit(1);
  }
  return taken;
}

// The same of a walk that compares alone, from a place that one which keeps items has left.
uint32_t compare(Random& random, const Automaton& automaton) {
  AutomatonPlace from{};
  from.state = uint16_t(automaton.start);
  from.num_closed = uint16_t(random() % (kMaxUniqueItems + 1));
  Pushes pushes;
  Walk<Items::kCompare> at(automaton, from, pushes);
  uint32_t taken = 0;
  while (taken < 200 && at.take(uint8_t(random()))) taken++;
  return taken;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  Random random(uint32_t(std::atoi(argv[2])));
  unsigned long long sound = 0, taken = 0;
  for (long n = std::atol(argv[1]); n > 0; n--) {
    uint32_t bytes = 0;
    const auto data = make(random, bytes);
    if (!is_sound(data.get(), bytes)) continue;
    sound++;
    const Automaton automaton(data.get());
    for (int text = 0; text < 4; text++) {
      taken += automaton.has_items() ? walk<Items::kKeep>(random, automaton) : walk<Items::kNone>(random, automaton);
      taken += automaton.has_items() ? compare(random, automaton) : 0;
    }
  }
  std::printf("sound %llu taken %llu\n", sound, taken);
}
