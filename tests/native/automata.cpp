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

uint32_t entry(Random& random, const AutomatonHeader& h) {
  const uint32_t kind = random() % 8;
  if (kind < 4) return random() % h.num_states;
  if (kind < 6 && h.num_calls > 0) return kCallEntry + random() % h.num_calls;
  return kind == 6 && random() % 4000 == 0 ? random() & 0xffff : kDeadEntry;
}

// Tables that nearly always lead somewhere inside.
std::unique_ptr<uint8_t[]> make(Random& random, uint32_t& bytes) {
  AutomatonHeader h{1 + uint32_t(random()) % 40, 1 + uint32_t(random()) % 20, uint32_t(random()) % 12, 0};
  h.start = random() % h.num_states;
  const AutomatonLayout l = automaton_layout(h);
  auto data = std::make_unique<uint8_t[]>(bytes = l.bytes);
  std::memcpy(data.get(), &h, sizeof h);
  for (uint32_t i = 0; i < kBytes; i++) data[sizeof h + i] = uint8_t(random() % h.num_classes);
  auto* calls = reinterpret_cast<uint16_t*>(&data[l.calls]);
  for (uint32_t i = 0; i < 2 * h.num_calls; i++) calls[i] = uint16_t(random() % h.num_states);
  auto* rows = reinterpret_cast<uint16_t*>(&data[l.rows]);
  for (uint32_t i = 0; i < (l.traits - l.rows) / 2; i++) rows[i] = uint16_t(entry(random, h));
  for (uint32_t i = 0; i < h.num_states; i++)
    data[l.traits + i] = uint8_t(random() % (kMaxNeed + 1) | (random() % 2 ? kFinalTrait : 0));
  if (random() % 4 == 0) {
    const uint32_t word = uint32_t(random());
    std::memcpy(&data[random() % (bytes / 4) * 4], &word, 4);
  }
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
uint32_t walk(Random& random, const uint8_t* data) {
  const Automaton automaton(data);
  AutomatonPlace places[2] = {};
  places[0].state = uint16_t(automaton.start);
  uint32_t taken = 0;
  for (uint32_t token = 0; token < 30; token++) {
    Pushes pushes;
    Walk at(automaton, places[token % 2], pushes);
    bool goes_on = true;
    for (uint32_t n = random() % 20; n > 0 && goes_on; n--) taken += goes_on = at.take(uint8_t(random()));
    if (!goes_on) break;
    at.store(places[~token & 1]);
    may_end(automaton, places[~token & 1]);
    if (places[~token & 1].depth > kMaxAutomatonDepth) std::exit(1);
  }
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
    for (int text = 0; text < 4; text++) taken += walk(random, data.get());
  }
  std::printf("sound %llu taken %llu\n", sound, taken);
}
