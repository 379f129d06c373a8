// SPDX-License-Identifier: Apache-2.0
// What drafts may cost: they never slow decoding by more than a small share, whatever the texts are.
//
// A step with drafts takes longer than its plain step would. That time is worth tokens, and a draft step wins its
// accepted ones. The credit is the difference, over all sequences. Each token of plain decoding adds a small part. A
// step may verify drafts if the credit bears that none is accepted.
#pragma once

#include "scheduler/cost.h"
#include "scheduler/ngram.h"

namespace blink {

constexpr int64_t kDraftShare = 128;                        // plain tokens that earn the loss of one
constexpr int64_t kFirstCredit = 8 * int64_t(kSureChance);  // that an engine begins with
constexpr int64_t kMostCredit = 32 * int64_t(kSureChance);  // beyond it
constexpr uint64_t kMostExcess = 4;  // times its plain step, that a step with drafts is taken to have lasted at most

// What the time beyond that of a plain step is worth: tokens, of kSureChance each.
BLINK_FN int64_t lost_tokens(uint32_t plain_tokens, uint64_t plain_ns, uint64_t ns) {
  const uint64_t excess = least(most(ns, plain_ns), (1 + kMostExcess) * plain_ns) - plain_ns;
  return int64_t(uint64_t(plain_tokens) * kSureChance * excess / plain_ns);
}

// Whether the credit bears that a step with drafts takes so long, and none is accepted.
BLINK_FN bool may_cost(const State& s, uint32_t plain_tokens, uint64_t plain_ns, uint64_t ns) {
  return !has_costs(s) || lost_tokens(plain_tokens, plain_ns, ns) <= s.draft_credit + kFirstCredit;
}

// Take over what plain decoding has earned since. Runs on: one lane.
BLINK_FN void earn_draft_credit(State& s) {
  const int64_t tokens = int64_t(s.statistics.generation_tokens - s.draft_credit_until);
  s.draft_credit_until = s.statistics.generation_tokens;
  s.draft_credit = least(s.draft_credit + tokens * int64_t(kSureChance) / kDraftShare, kMostCredit);
}

// Note the plain step that a step with drafts stands for. Runs on: one lane.
BLINK_FN void open_draft_account(State& s, uint32_t plain_tokens, uint64_t plain_ns) {
  s.draft_plain_tokens = plain_tokens;
  s.draft_plain_ns = plain_ns;
}

// Pay for a step with drafts what it took, and add the tokens that it won. Runs on: one lane.
BLINK_FN void close_draft_account(State& s, uint32_t accepted) {
  if (!has_costs(s)) return;
  const int64_t lost = lost_tokens(s.draft_plain_tokens, s.draft_plain_ns, s.account.spent_ns);
  s.draft_credit = least(s.draft_credit + int64_t(accepted) * int64_t(kSureChance) - lost, kMostCredit);
}

}  // namespace blink
