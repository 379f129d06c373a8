// SPDX-License-Identifier: Apache-2.0
// What one row of a step is. Admission stores its kind as it chooses the row; nothing else tells kinds of rows apart.
//
// Speculation adds a kind here: a verify row, of 1 + drafts tokens and as many samples. In the model's batch it is that
// number of rows of one token, from first_sample on. accept() then compares its samples with the drafts. LoRA adds a
// field here: the row's adapter.
#pragma once

#include "region/layout.h"

namespace blink {

enum class RowKind : uint32_t {
  kNone,     // the sequence takes no part in the step
  kPrefill,  // several tokens of a prompt
  kDecode,   // one token, by the kernels of decoding
};

struct Row {
  FIELDS_OF(Row);
  FIELD(RowKind, kind);
  FIELD(uint32_t, sequence);
  FIELD(uint32_t, first_token);  // in the step's arrays of tokens
  FIELD(uint32_t, num_tokens);
  FIELD(uint32_t, first_sample);  // in the step's arrays of rows
  FIELD(uint32_t, num_samples);   // 0: more of its tokens are left to compute
};

// The kind of the next tokens of a prompt. A single one is computed as decoding is, so that steps of such rows are too.
BLINK_FN RowKind kind_of_chunk(uint32_t num_tokens) {
  return num_tokens > 1 ? RowKind::kPrefill : num_tokens == 1 ? RowKind::kDecode : RowKind::kNone;
}

// How many of a row's samples its sequence takes over as tokens.
BLINK_FN uint32_t accept(const Row& row) { return row.num_samples; }

}  // namespace blink
