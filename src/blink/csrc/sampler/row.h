// SPDX-License-Identifier: Apache-2.0
// A row of logits that a group of threads shares out, and sums over it. A group is kBlocks blocks of kThreads threads:
// a cluster on a Hopper, one block on another GPU, one thread on a CPU. It says who a thread is, how threads meet, in
// which numbers masses are added up (Real) and counted (Units), and how many loads a thread has under way (kLoads).
#pragma once

#include "region/layout.h"

#if defined(__CUDACC_RTC__)
#define BLINK_UNROLLED _Pragma("unroll")
#define BLINK_UNROLLED_BY_4 _Pragma("unroll 4")
#define BLINK_ROLLED _Pragma("unroll 1")  // the step's kernels share the instruction cache
#else
#define BLINK_UNROLLED
#define BLINK_UNROLLED_BY_4
#define BLINK_ROLLED
#endif

namespace blink {

constexpr int kBins = 1024;
constexpr uint32_t kMostListed = 512;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);
constexpr float kLeastFloat = -3.4028234e38f;
constexpr double kLog2E = 1.4426950408889634;

struct alignas(16) Quad {
  float values[4];
};

// Keys in the order of float values.
BLINK_FN uint32_t to_key(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
BLINK_FN float from_key(uint32_t key) {
  return __builtin_bit_cast(float, key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

BLINK_FN bool is_finite(float value) { return value < kInfinity && value > -kInfinity; }

BLINK_FN uint32_t count_bits(uint32_t word) {
#if defined(__CUDACC_RTC__)
  return uint32_t(__popc(word));
#else
  return uint32_t(__builtin_popcount(word));
#endif
}

// What a block's threads share.
template <class Group>
struct alignas(16) RowShared {
  using Real = typename Group::Real;
  using Units = typename Group::Units;
  static constexpr int kWarps = Group::kThreads / Group::kWarp;

  Units bins[kBins];
  float own[kMostListed];  // what lies in the chosen bin, of this block's part
  Real of_warps[2][kWarps];
  float values[kWarps];  // winners of warps
  uint32_t tokens[kWarps];
  uint32_t num_own, listed_before, best_key;
  // From other blocks.
  float largest[Group::kBlocks], least[Group::kBlocks];
  uint32_t chosen, settled;
  float floor;
  float block_values[Group::kBlocks];
  uint32_t block_tokens[Group::kBlocks];
  // Block 0's.
  Real above[Group::kBlocks], total[Group::kBlocks];
  float listed[kMostListed];
  Real sum;
  Units weights[kMostListed];
  uint32_t num_listed, least_key, num_changes;
  int reached, filled;  // bins: the first, the last
};

// Which quads of a row are a block's.
template <class Group>
BLINK_FN void share_out(const Group& group, uint32_t quads, uint32_t& first, uint32_t& count) {
  const uint32_t share = (quads + Group::kBlocks - 1) / Group::kBlocks;
  first = least(group.block() * share, quads);
  count = least(share, quads - first);
}

// Visit each quad of a part.
template <class Group, class Part, class Visit>
BLINK_FN void for_each_quad(const Group& group, const Part& part, Visit visit, uint32_t from = 0) {
  BLINK_ROLLED
  for (uint32_t i = from + group.thread(); i < part.count; i += Group::kThreads) visit(part.get(i), i);
}

// The same where little is done with each: several are loaded before the first is visited.
template <class Group, class Part, class Visit>
BLINK_FN void scan_quads(const Group& group, const Part& part, Visit visit) {
  uint32_t whole = 0;
  if constexpr (Group::kLoads > 1) {
    constexpr uint32_t kStep = Group::kLoads * Group::kThreads;
    whole = part.count / kStep * kStep;
    BLINK_ROLLED
    for (uint32_t i = group.thread(); i < whole; i += kStep) {
      Quad quads[Group::kLoads];
      BLINK_UNROLLED
      for (int load = 0; load < Group::kLoads; load++) quads[load] = part.load(i + load * Group::kThreads);
      BLINK_UNROLLED
      for (int load = 0; load < Group::kLoads; load++) {
        const uint32_t at = i + load * Group::kThreads;
        visit(part.change(quads[load], at), at);
      }
    }
  }
  for_each_quad(group, part, visit, whole);
}

// Visit each logit of a part and its token.
template <class Group, class Part, class Visit>
BLINK_FN void for_each(const Group& group, const Part& part, Visit visit) {
  for_each_quad(group, part, [&](const Quad& quad, uint32_t i) {
    BLINK_UNROLLED
    for (int j = 0; j < 4; j++) visit(quad.values[j], (part.first + i) * 4 + j);
  });
}

// What blocks have told block 0, in their order.
template <class Group, class Real>
BLINK_FN Real sum_of_blocks(const Group&, const Real* told) {
  Real sum = 0;
  for (int other = 0; other < Group::kBlocks; other++) sum += told[other];
  return sum;
}

struct Extremes {
  float largest;  // NaN if there is one
  float least;    // -inf if there is one
};

// Every thread of the group gets those of the row.
template <class Group, class Part>
BLINK_FN Extremes find_extremes(const Group& group, RowShared<Group>& shared, const Part& part) {
  constexpr int kWarps = RowShared<Group>::kWarps;
  const int lane = group.thread() % Group::kWarp, warp = group.thread() / Group::kWarp;
  typename Group::Range range;
  scan_quads(group, part, [&](const Quad& quad, uint32_t) { range.take(quad); });
  float largest = range.largest(), smallest = range.smallest();
  BLINK_UNROLLED
  for (int step = Group::kWarp / 2; step > 0; step /= 2) {
    largest = group.larger(largest, group.from_lane_xor(largest, step));
    smallest = group.smaller(smallest, group.from_lane_xor(smallest, step));
  }
  if (lane == 0) shared.of_warps[0][warp] = largest, shared.of_warps[1][warp] = smallest;
  group.sync();
  if (group.thread() < Group::kBlocks) {
    for (int other = 0; other < kWarps; other++) {
      largest = group.larger(largest, float(shared.of_warps[0][other]));
      smallest = group.smaller(smallest, float(shared.of_warps[1][other]));
    }
    group.tell(group.thread(), shared.largest[group.block()], largest);
    group.tell(group.thread(), shared.least[group.block()], smallest);
  }
  group.meet();
  for (int other = 0; other < Group::kBlocks; other++) {
    largest = group.larger(largest, shared.largest[other]);
    smallest = group.smaller(smallest, shared.least[other]);
  }
  return {largest, smallest};
}

// Add up over the block's threads; its first thread gets the sums.
template <class Group, class Real>
BLINK_FN void add_up(const Group& group, RowShared<Group>& shared, Real& a, Real& b) {
  const int lane = group.thread() % Group::kWarp, warp = group.thread() / Group::kWarp;
  BLINK_UNROLLED
  for (int step = Group::kWarp / 2; step > 0; step /= 2) {
    a += group.from_lane_xor(a, step);
    b += group.from_lane_xor(b, step);
  }
  if (lane == 0) shared.of_warps[0][warp] = a, shared.of_warps[1][warp] = b;
  group.sync();
  if (group.thread() > 0) return;
  for (int other = 1; other < RowShared<Group>::kWarps; other++)
    a += shared.of_warps[0][other], b += shared.of_warps[1][other];
}

// Add up the numbers of the block's threads before this one.
template <class Group, class Real>
BLINK_FN Real add_up_before(const Group& group, RowShared<Group>& shared, Real own) {
  const int lane = group.thread() % Group::kWarp, warp = group.thread() / Group::kWarp;
  Real sum = own;
  BLINK_UNROLLED
  for (int step = 1; step < Group::kWarp; step *= 2) {
    const Real other = group.from_lane_before(sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == Group::kWarp - 1) shared.of_warps[0][warp] = sum;
  const Real before = group.from_lane_before(sum, 1);
  group.sync();
  Real base = 0;
  for (int other = 0; other < warp; other++) base += shared.of_warps[0][other];
  return lane > 0 ? base + before : base;
}

}  // namespace blink
