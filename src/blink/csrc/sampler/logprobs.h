// SPDX-License-Identifier: Apache-2.0
// A row's best logits and the mass of all, as the model made them. Of equal logits those of the lowest tokens come
// first.
#pragma once

#include "sampler/floor.h"

namespace blink {

struct Best {  // block 0's
  float values[kMaxLogprobs];
  uint32_t tokens[kMaxLogprobs];
  uint32_t count;
  // Every block's. Each look for a tie has a word of its own, for others may be one look ahead.
  uint32_t ties[2 * kMaxLogprobs];  // lowest tokens of equal logits; then of those that are not finite
  uint32_t num_above;
};

template <class Group, class Part>
class Ranking {
 public:
  using Real = typename Group::Real;

  BLINK_FN Ranking(const Group& group, RowShared<Group>& shared, Best& best, const Part& part, Extremes extremes)
      : group_(group), shared_(shared), best_(best), part_(part), extremes_(extremes) {}

  // The sum of exp(logit - largest). Block 0 gets it.
  BLINK_FN Real add_masses() {
    Real mass = 0, none = 0;
    for_each(group_, part_,
             [&](float value, uint32_t) { mass += group_.exp2((value - Real(extremes_.largest)) * Real(kLog2E)); });
    add_up(group_, shared_, mass, none);
    if (group_.thread() == 0) group_.tell(0, shared_.total[group_.block()], mass);
    group_.meet();
    return sum_of_blocks(group_, shared_.total);
  }

  // Leave the best logits in block 0, in no order: those above the last one, then its equals from the lowest token on.
  BLINK_FN void find(uint32_t wanted) {
    FloorSearch<Group, Part> search(group_, shared_, part_, extremes_, 1);
    search.template raise<false>(Real(wanted));
    for (uint32_t i = group_.thread(); i < 2 * kMaxLogprobs; i += Group::kThreads) best_.ties[i] = kNoTie;
    if (group_.thread() == 0) best_.count = 0;
    group_.meet();
    list_above(search.floor);
    group_.meet();
    if (group_.block() == 0 && group_.thread() < Group::kBlocks)
      group_.tell(group_.thread(), best_.num_above, best_.count);
    group_.meet();
    float tied = search.floor;
    for (uint32_t place = best_.num_above, next = 0; place < wanted;) {
      uint32_t& tie = best_.ties[tied == -kInfinity ? kMaxLogprobs + place : place];
      lower_to_tied(tie, tied, next);
      group_.meet();
      const uint32_t token = tie;
      if (token == kNoTie) {  // there are not so many finite ones
        if (tied == -kInfinity) return;
        tied = -kInfinity, next = 0;
        continue;
      }
      if (group_.thread() == 0) best_.values[place] = tied, best_.tokens[place] = token;
      next = token + 1, place++;
    }
  }

 private:
  static constexpr uint32_t kNoTie = ~0u;

  BLINK_FN void list_above(float floor) {
    for_each(group_, part_, [&](float value, uint32_t token) {
      if (!(value > floor)) return;
      const uint32_t place = group_.add_in(0, best_.count, 1u);
      group_.tell(0, best_.values[place], value);
      group_.tell(0, best_.tokens[place], token);
    });
  }

  // Tell all blocks the lowest token from `next` on with that logit.
  BLINK_FN void lower_to_tied(uint32_t& tie, float tied, uint32_t next) {
    uint32_t lowest = kNoTie;
    for_each(group_, part_, [&](float value, uint32_t token) {
      if (value == tied && token >= next) lowest = least(lowest, token);
    });
    if (lowest == kNoTie) return;
    BLINK_ROLLED
    for (int block = 0; block < Group::kBlocks; block++) group_.lower_in(block, tie, lowest);
  }

  const Group& group_;
  RowShared<Group>& shared_;
  Best& best_;
  const Part& part_;
  const Extremes extremes_;
};

// Write the best ones in order. Runs on: block 0.
template <class Group>
BLINK_FN void write_best(const Group& group, const Best& best, uint32_t count, typename Group::Real log_mass,
                         int32_t* tokens, float* logprobs) {
  group.sync();
  for (uint32_t i = group.thread(); i < count; i += Group::kThreads) {
    const float value = best.values[i];
    const uint32_t token = best.tokens[i];
    uint32_t rank = 0;
    BLINK_ROLLED
    for (uint32_t other = 0; other < count; other++)
      rank += best.values[other] > value || (best.values[other] == value && best.tokens[other] < token);
    tokens[rank] = int32_t(token);
    logprobs[rank] = float(value - log_mass);
  }
}

}  // namespace blink
