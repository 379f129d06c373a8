// SPDX-License-Identifier: Apache-2.0
// The invariants of a step's rows that verify drafts, checked from scratch. Host only.
#pragma once

#include "scheduler/drafts.h"

namespace blink {

// First broken invariant of a row with drafts, or null. Those of the batch that verify them have one token each, of the
// same slot, one after the other.
inline const char* check_verify_row(const State& s, const StepBuffers& a, uint32_t first, const Sequence& q) {
  const Row& row = a.rows[first];
  if (first + row.num_tokens > a.header->num_decode_rows) return "a draft stands among another kind";
  const uint32_t drafts = row.num_samples - 1;
  if (drafts == 0 || drafts > s.geometry.spec_tokens) return "a draft has no such length";
  if (row.num_samples != row.num_tokens || !is_decoding(q)) return "a draft is not behind its text";
  if (q.num_tokens + row.num_tokens > s.geometry.max_model_len) return "a draft leads out of its slot";
  if (q.num_generated + row.num_tokens > q.sqe.max_tokens) return "a draft is longer than the answer may be";
  for (uint32_t i = 0; i < row.num_tokens; i++) {
    const uint32_t at = first + i;
    if (i > 0 && a.rows[at].kind != RowKind::kNone) return "a draft token has a row of its own";
    if (a.row_slots[at] != int32_t(q.slot) || a.query_starts[at] != int32_t(at)) return "a draft token is misplaced";
    if (a.context_lens[at] != int32_t(q.num_tokens + i)) return "a draft token sees another context";
  }
  return nullptr;
}

}  // namespace blink
