// SPDX-License-Identifier: Apache-2.0
// Drafts of the model's draft head: the engine writes them with a step's samples, for the text with its newest token.
//
// A draft counts for a text of one length: the draft of an earlier step is for a shorter text. index_slot() takes away
// that of the slot's former text.
#pragma once

#include "scheduler/ngram.h"

namespace blink {

// Let the head's draft be the sequence's, at most so many tokens of it, where it is longer than the one that was found
// and begins like it. Runs on: one lane for each sequence.
BLINK_FN void take_head_draft(const State& s, Sequence& q, uint32_t limit) {
  Drafting& d = q.drafting;
  const HeadDraft& head = s.head_drafts[q.slot];
  const uint32_t count = head.num_tokens == q.num_tokens ? least(head.count, least(limit, kMaxDrafts)) : 0;
  if (count <= d.num_found) return;
  int32_t* draft = tokens_of(s, q.slot) + q.num_tokens;
  for (uint32_t i = 0; i < count; i++) {
    const int32_t token = head.tokens[i];
    if (uint32_t(token) >= s.geometry.vocab_size || (i < d.num_found && token != draft[i])) return;
  }
  for (uint32_t i = d.num_found; i < count; i++) draft[i] = head.tokens[i];
  d.num_found = count;
  d.is_prediction = 0;
  d.origin = DraftOrigin::kHead;
}

// Whether a draft behind a sequence's next sample would be of use: the engine makes one if it has such graphs.
BLINK_FN bool is_guessed_behind(const State& s, const Sequence& q) {
  if (!s.geometry.has_draft_head || q.row.num_samples == 0) return false;
  return q.num_tokens + q.row.num_samples >= s.head_drafts[q.slot].rests_until;
}

}  // namespace blink
