// SPDX-License-Identifier: Apache-2.0
// The token of a row that does not take its largest logit. Of those above the floor that min-p, top-k and top-p leave,
// it is the largest with Gumbel's noise. The noise comes from Philox4x32-10: Salmon et al., "Parallel random numbers:
// as easy as 1, 2, 3", SC 2011. Few logits can win at all, which a look at the random bits tells: logarithms are for
// those.
#pragma once

#include "sampler/floor.h"

namespace blink {

constexpr float kGreedyTemperature = 1e-5f;                 // below it sampling is greedy, as in vLLM
constexpr float kLeastNoise = -2.82f, kMostNoise = 22.88f;  // of the largest and the smallest random word

struct Words {
  uint32_t of[4];
};

// Ten rounds of Philox: the random words of a counter.
BLINK_FN Words philox(Words w, uint32_t key_low, uint32_t key_high) {
  BLINK_UNROLLED
  for (int round = 0; round < 10; round++) {
    const uint64_t a = uint64_t(0xD2511F53u) * w.of[0], b = uint64_t(0xCD9E8D57u) * w.of[2];
    w = {{uint32_t(b >> 32) ^ w.of[1] ^ key_low, uint32_t(b), uint32_t(a >> 32) ^ w.of[3] ^ key_high, uint32_t(a)}};
    key_low += 0x9E3779B9u, key_high += 0xBB67AE85u;
  }
  return w;
}

// The random words of four tokens from a multiple of 4 on, at one length of the sequence.
BLINK_FN Words words_of(uint32_t first, uint32_t step, uint32_t key_low, uint32_t key_high) {
  return philox({{first / 4, 0, step, 0}}, key_low, key_high);
}

// A random word as a number between 0 and 1, and that as noise. The smallest number wins, and float32 is finest near 0.
// The largest word would round to 1, whose noise is -inf: a token that is the only choice could then lose.
template <class Group>
BLINK_FN float to_uniform(const Group& group, uint32_t word) {
  return group.smaller((float(word) + 0.5f) * 0x1p-32f, 1 - 0x1p-24f);
}
BLINK_FN float to_noise(float uniform) { return -logf(-log1pf(-uniform)); }

struct Winner {
  float value;  // with noise
  uint32_t token;
};
// Of equal ones that of the lower token; of any and a NaN the NaN.
BLINK_FN Winner better(Winner a, Winner b) {
  return b.value > a.value || (b.value == a.value && b.token < a.token) || b.value != b.value ? b : a;
}

// Every thread of the group gets the best of all threads' winners.
template <class Group>
BLINK_FN Winner meet_winners(const Group& group, RowShared<Group>& shared, Winner found) {
  const int lane = group.thread() % Group::kWarp, warp = group.thread() / Group::kWarp;
  BLINK_UNROLLED
  for (int step = Group::kWarp / 2; step > 0; step /= 2)
    found = better(found, {group.from_lane_xor(found.value, step), group.from_lane_xor(found.token, step)});
  if (lane == 0) shared.values[warp] = found.value, shared.tokens[warp] = found.token;
  group.sync();
  if (group.thread() < Group::kBlocks) {
    BLINK_ROLLED
    for (int other = 0; other < RowShared<Group>::kWarps; other++)
      found = better(found, {shared.values[other], shared.tokens[other]});
    group.tell(group.thread(), shared.block_values[group.block()], found.value);
    group.tell(group.thread(), shared.block_tokens[group.block()], found.token);
  }
  group.meet();
  for (int other = 0; other < Group::kBlocks; other++)
    found = better(found, {shared.block_values[other], shared.block_tokens[other]});
  return found;
}

// Draw from the logits, divided by the temperature, that reach the floor. Every thread gets the winner of the row.
template <class Group, class Part>
BLINK_FN Winner draw(const Group& group, RowShared<Group>& shared, const Part& part, float largest, float floor,
                     uint32_t step, const Sampling& p) {
  const float temperature = p.temperature, factor = 1 / temperature;
  if (group.thread() == 0) shared.best_key = to_key(largest / temperature + kLeastNoise);
  group.sync();
  Winner found{-kInfinity, ~0u};
  const uint32_t seed_low = p.seed_low, seed_high = p.seed_high;
  for_each_quad(group, part, [&](const Quad& quad, uint32_t i) {
    const float best = from_key(group.peek(shared.best_key));
    const float nearest =
        group.larger(group.larger(quad.values[0], quad.values[1]), group.larger(quad.values[2], quad.values[3]));
    if (nearest < floor || nearest * factor + kMostNoise < best) return;
    const uint32_t first = (part.first + i) * 4;
    const Words words = words_of(first, step, seed_low, seed_high);
    BLINK_UNROLLED
    for (int j = 0; j < 4; j++) {
      const float uniform = to_uniform(group, words.of[j]), distance = quad.values[j] * factor - best;
      // -log(uniform) is above the noise, and must reach from the value to the best; a little more for roundings.
      if (quad.values[j] < floor || uniform > group.exp2(distance * float(kLog2E)) * 1.0001f) continue;
      const Winner other{quad.values[j] / temperature + to_noise(uniform), first + j};
      if (other.value > best) group.raise(shared.best_key, to_key(other.value));
      found = better(found, other);
    }
  });
  return meet_winners(group, shared, found);
}

}  // namespace blink
