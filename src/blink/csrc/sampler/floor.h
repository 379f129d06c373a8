// SPDX-License-Identifier: Apache-2.0
// The floor of min-p, top-k and top-p: the least logit of a row that may be drawn. Top-k and top-p ask for the least
// distance from the largest logit within which k logits lie, or a mass of p. A pass sorts logits into bins by their
// distance, block 0 finds the bin in which the target is reached, and what lies in that is listed and compared. Where
// the list is too short, the bin is sorted into bins again. Numbers are added up whole, or in a fixed order.
#pragma once

#include "sampler/row.h"

namespace blink {

constexpr float kNear = 16;         // natural logarithms below the largest that have bins at first
constexpr float kFarthest = 104;    // from there on a weight is 0
constexpr int kLevels = 3;          // of bins within bins; the last one's tell nothing apart
constexpr int kMostWidenings = 26;  // from 16 to beyond all floats
constexpr uint32_t kWiden = ~0u;    // in place of a bin

template <class Group, class Part>
class FloorSearch {
 public:
  using Real = typename Group::Real;
  using Units = typename Group::Units;
  static constexpr bool kIsAlone = Group::kBlocks * Group::kThreads == 1;

  BLINK_FN FloorSearch(const Group& group, RowShared<Group>& shared, const Part& part, Extremes extremes, float factor)
      : group_(group), shared_(shared), part_(part), largest_(extremes.largest), rate_(factor * Real(kLog2E)) {
    const float range = least(extremes.largest - extremes.least, kNear / factor);
    const float size = extremes.largest < 0 ? -extremes.largest : extremes.largest;
    first_width_ = most(range / (kBins - 1), most(size * 0x1p-20f, 1e-30f));  // offset_ is exact enough
  }

  float floor = kLeastFloat;  // of what may be drawn

  // Raise the floor to where the target is reached: a number of logits, or a share of the mass above the floor.
  template <bool kIsMass>
  BLINK_FN void raise(Real target) {
    level_ = 0, begin_ = 0;
    cover(first_width_);
    for (int widenings = 0;;) {
      const bool may_widen = widenings < kMostWidenings;
      const uint32_t bin = level_ == 0 ? count<kIsMass, false>(target, may_widen) : count<kIsMass, true>(target, false);
      if (bin == kWiden) {
        cover(width_ * 32), widenings++;
      } else {
        if (level_ == 0 ? settle<kIsMass, false>(bin) : settle<kIsMass, true>(bin)) return;
        descend(bin);
      }
    }
  }

 private:
  // Choose what each bin of the first level covers.
  BLINK_FN void cover(Real width) {
    width_ = width;
    scale_ = -1 / width;
    offset_ = largest_ / width;
  }

  // How many bins of this level a logit is behind where they begin. The first level's are above -1.
  template <bool kIsDeep>
  BLINK_FN Real locate(float value) const {
    const Real distance = group_.multiply_add(value, scale_, offset_);
    if (!kIsDeep) return distance;
    const Real within = (most(distance, Real(0)) - first_bin_) * kBins;
    return level_ > 1 ? (within - second_bin_) * kBins : within;
  }

  BLINK_FN void descend(uint32_t bin) {
    begin_ += Real(bin) * width_;
    width_ /= kBins;
    (level_ == 0 ? first_bin_ : second_bin_) = Real(bin);
    level_++;
  }

  // What a logit weighs, if the largest weighs 1; distance: where it is located.
  template <bool kIsMass, bool kIsDeep>
  BLINK_FN Real weigh(float value, Real distance) const {
    if (!kIsMass) return 1;
    return kIsDeep ? group_.exp2((value - largest_) * rate_) : weigh_behind(distance, 0);
  }

  // What a logit weighs so far behind another, in bins, if that weighs 2^log2_unit.
  BLINK_FN Real weigh_behind(Real distance, Real log2_unit) const {
    return group_.exp2(group_.multiply_add(distance, -width_ * rate_, log2_unit));
  }

  template <class Visit>
  BLINK_FN void visit_row(Visit visit) const {
    for_each(group_, part_, [&](float value, uint32_t) { visit(value, value >= floor); });
  }

  // The bin of this level in which the target is reached.
  template <bool kIsMass, bool kIsDeep>
  BLINK_FN uint32_t count(Real target, bool may_widen) {
    BLINK_ROLLED
    for (int bin = group_.thread(); bin < kBins; bin += Group::kThreads) shared_.bins[bin] = 0;
    group_.sync();
    group_.arrive();  // all blocks have empty bins once all have waited
    Real total = 0, above = 0;
    visit_row([&](float value, bool counts) {
      const Real distance = locate<kIsDeep>(value), weight = counts ? weigh<kIsMass, kIsDeep>(value, distance) : 0;
      if (kIsDeep)
        above += distance < 0 ? weight : 0;
      else
        total += weight;
      const bool has_bin = counts && distance < kBins && (!kIsDeep || distance >= 0);
      if (kIsAlone && !has_bin) return;  // lanes of a warp would wait for each other
      const int bin = int(distance);
      const Units share = kIsMass ? group_.round(weigh_behind(distance - Real(bin), Group::kLog2BinUnit)) : Units(1);
      if (has_bin) group_.add(shared_.bins[bin], share);
    });
    add_up(group_, shared_, total, above);
    group_.wait();
    if (group_.thread() == 0) tell_sums(above, total);
    if (group_.block() > 0) hand_over_bins();
    group_.meet();
    if (group_.block() == 0) choose<kIsMass>(target, may_widen);
    group_.meet();
    return shared_.chosen;
  }

  BLINK_FN void tell_sums(Real above, Real total) {
    group_.tell(0, shared_.above[group_.block()], above);
    group_.tell(0, shared_.total[group_.block()], total);
  }

  BLINK_FN void hand_over_bins() {
    BLINK_ROLLED
    for (int bin = group_.thread(); bin < kBins; bin += Group::kThreads)
      if (const Units filled = shared_.bins[bin]) group_.add_in(0, shared_.bins[bin], filled);
  }

  // Tell all blocks the bin. Runs on: block 0.
  template <bool kIsMass>
  BLINK_FN void choose(Real target, bool may_widen) {
    constexpr int kOwn = kBins / Group::kThreads;
    const Real above = sum_of_blocks(group_, shared_.above), total = sum_of_blocks(group_, shared_.total);
    if (level_ == 0) wanted_ = kIsMass ? target * total : target;
    if (group_.thread() == 0)
      shared_.reached = kBins, shared_.filled = 0, shared_.num_listed = 0, shared_.least_key = ~0u;
    Real weights[kOwn], own = 0;
    const int first = group_.thread() * kOwn;
    BLINK_UNROLLED
    for (int i = 0; i < kOwn; i++) {
      const Real sum = Real(shared_.bins[first + i]);
      own += weights[i] =
          kIsMass ? sum * group_.exp2(-begin_ * rate_ - Real(first + i) * width_ * rate_ - Real(Group::kLog2BinUnit))
                  : sum;
    }
    Real sum = above + add_up_before(group_, shared_, own);  // synchronises
    BLINK_UNROLLED
    for (int i = 0; i < kOwn; i++) {
      sum += weights[i];
      if (shared_.bins[first + i] == 0) continue;
      group_.raise(shared_.filled, first + i);
      if (sum >= wanted_) group_.lower(shared_.reached, first + i);
    }
    if (group_.thread() == Group::kThreads - 1) shared_.sum = sum;
    group_.sync();
    if (group_.thread() >= Group::kBlocks) return;
    // By rounding, or because there are not so many, the target may be beyond the last.
    const bool is_beyond = shared_.reached == kBins && level_ == 0 && may_widen;
    const bool has_more = kIsMass ? width_ * kBins * rate_ < kFarthest * Real(kLog2E) : shared_.sum < total;
    const uint32_t bin = shared_.reached < kBins ? shared_.reached : shared_.filled;
    group_.tell(group_.thread(), shared_.chosen, is_beyond && has_more ? kWiden : bin);
  }

  // Take the floor from what lies in the bin, or say that this is too much.
  template <bool kIsMass, bool kIsDeep>
  BLINK_FN bool settle(uint32_t bin) {
    const Real begin = Real(bin), end = begin + 1;
    const bool is_last = level_ == kLevels - 1;
    Real above = 0, none = 0;
    if (group_.thread() == 0) shared_.num_own = 0;
    group_.sync();
    visit_row([&](float value, bool counts) {
      const Real distance = locate<kIsDeep>(value);
      const bool is_nearer = distance < begin && (kIsDeep || bin > 0);
      above += counts && is_nearer ? weigh<kIsMass, kIsDeep>(value, distance) : 0;
      if (!counts || is_nearer || !(distance < end)) return;
      const uint32_t place = group_.add(shared_.num_own, 1u);
      if (place < kMostListed) shared_.own[place] = value;
      if (is_last) group_.lower_in(0, shared_.least_key, to_key(value));
    });
    add_up(group_, shared_, above, none);  // synchronises
    if (group_.thread() == 0) {
      tell_sums(above, 0);
      shared_.listed_before = group_.add_in(0, shared_.num_listed, shared_.num_own);
    }
    group_.sync();
    BLINK_ROLLED
    for (uint32_t i = group_.thread(); i < least(shared_.num_own, kMostListed); i += Group::kThreads)
      if (const uint32_t place = shared_.listed_before + i; place < kMostListed)
        group_.tell(0, shared_.listed[place], shared_.own[i]);
    group_.meet();
    if (group_.block() == 0) compare<kIsMass, kIsDeep>(begin);
    group_.meet();
    if (!shared_.settled) return false;
    floor = shared_.floor;
    return true;
  }

  // Tell all blocks the floor, if there is one. Runs on: block 0.
  template <bool kIsMass, bool kIsDeep>
  BLINK_FN void compare(Real begin) {
    const uint32_t count = shared_.num_listed;
    const bool is_last = level_ == kLevels - 1, fits = count <= kMostListed;
    if (!is_last && fits) {
      BLINK_ROLLED
      for (uint32_t i = group_.thread(); i < count; i += Group::kThreads) {
        const Real behind = locate<kIsDeep>(shared_.listed[i]) - begin;
        shared_.weights[i] = kIsMass ? group_.round(weigh_behind(behind, Group::kLog2ListUnit)) : Units(1);
      }
      group_.sync();
      const Real above = sum_of_blocks(group_, shared_.above);
      const Real unit = kIsMass ? group_.exp2((begin_ + begin * width_) * -rate_ - Real(Group::kLog2ListUnit)) : 1;
      BLINK_ROLLED
      for (uint32_t i = group_.thread(); i < count; i += Group::kThreads) {
        const float value = shared_.listed[i];
        Units before = 0;
        BLINK_UNROLLED_BY_4
        for (uint32_t other = 0; other < count; other++)
          if (shared_.listed[other] > value) before += shared_.weights[other];
        if (before == 0 || Real(before) * unit < wanted_ - above) group_.lower(shared_.least_key, to_key(value));
      }
      group_.sync();
    }
    if (group_.thread() >= Group::kBlocks) return;
    group_.tell(group_.thread(), shared_.floor, from_key(shared_.least_key));
    group_.tell(group_.thread(), shared_.settled, uint32_t(is_last || fits));
  }

  const Group& group_;
  RowShared<Group>& shared_;
  const Part& part_;
  const Real largest_, rate_;    // rate_: of a distance, for powers of 2
  Real first_width_;             // of the first level's bins
  Real begin_, width_;           // of this level: the distance where its bins begin, and what each covers
  Real scale_, offset_;          // from a logit to its first level's bin
  Real first_bin_, second_bin_;  // chosen
  Real wanted_ = 0;              // block 0's
  int level_ = 0;
};

// Find the least logit that may be drawn. Every block finds the same.
template <class Group, class Part>
BLINK_FN float find_floor(const Group& group, RowShared<Group>& shared, const Part& part, Extremes extremes,
                          float factor, const Sampling& p) {
  using Real = typename Group::Real;
  FloorSearch<Group, Part> search(group, shared, part, extremes, factor);
  if (p.min_p > 0) search.floor = float(Real(extremes.largest) + group.log(Real(p.min_p)) / factor);
  if (p.top_k > 0) search.template raise<false>(Real(p.top_k));
  if (p.top_p < 1) search.template raise<true>(Real(p.top_p));
  return search.floor;
}

}  // namespace blink
