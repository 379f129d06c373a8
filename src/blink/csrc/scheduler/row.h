// SPDX-License-Identifier: Apache-2.0
// What one row of a step is. Admission stores its kind as it chooses the row; nothing else tells kinds of rows apart.
//
// A verify row has 1 + drafts tokens and as many samples. In the model's batch it is that number of rows of one token,
// from first_sample on: only these have the bits of plain decoding. The first of them is described here, the others are
// of kind kNone.
#pragma once

#include "region/layout.h"

namespace blink {

enum class RowKind : uint32_t {
  kNone,     // the sequence takes no part in the step
  kPrefill,  // several tokens of a prompt
  kDecode,   // one token, by the kernels of decoding
  kVerify,   // one token and drafts of those behind it, each by the kernels of decoding
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

// Whether a row's sequence decodes in the step.
BLINK_FN bool decodes(const Row& row) { return row.kind == RowKind::kDecode || row.kind == RowKind::kVerify; }

// How many tokens attention reads for a row whose last one is at an end: with drafts it does so for each of its tokens.
BLINK_FN uint32_t read_tokens(const Row& row, uint32_t end) {
  return row.kind == RowKind::kVerify ? end * row.num_tokens : end;
}

// How many of a row's tokens are the sequence's, whatever is sampled.
BLINK_FN uint32_t certain_tokens(const Row& row) { return row.kind == RowKind::kVerify ? 1 : row.num_tokens; }

}  // namespace blink
