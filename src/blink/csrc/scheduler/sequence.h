// SPDX-License-Identifier: Apache-2.0
// What the scheduler keeps of one generation.
#pragma once

#include "scheduler/host_tier_state.h"
#include "scheduler/row.h"

namespace blink {

constexpr uint32_t kNone = 0xffffffffu;

// What a draft is made of: tokens that stand elsewhere in the request's texts, those that its automaton leaves,
// tokens of recent answers, or those that the model's draft head expects.
enum class DraftOrigin : uint32_t { kText, kGrammar, kAnswers, kHead };
constexpr uint32_t kDraftOrigins = 4;

// What became of a sequence's drafts of one origin.
struct OriginRecord {
  FIELDS_OF(OriginRecord);
  FIELD(uint32_t, chance);       // that a draft token is accepted, of kSureChance
  FIELD(uint32_t, num_misses);   // drafts in a row that were of no use
  FIELD(uint32_t, rests_until);  // number of generated tokens before which none are made
  FIELD(uint32_t, next_rest);    // how many tokens the next rest takes
};

// Where JSON may have white space: after a colon, a comma or an opening bracket, or before a closing one.
enum class Gap : uint8_t { kColon, kComma, kOpen, kClose, kNone };
constexpr uint32_t kGaps = 4;
constexpr uint8_t kNewlineRun = 0xfe, kUnknownRun = 0xff;  // of Spacing::runs; others: so many spaces
constexpr uint32_t kMostSpaces = 0xf0;

// The white space that a text of JSON has (json_spacing.h).
struct Spacing {
  FIELDS_OF(Spacing);
  FIELD(uint8_t, in_string);
  FIELD(uint8_t, is_escaped);   // a backslash stands before the next byte of the string
  FIELD(uint8_t, gap);          // Gap behind the last byte that was no white space
  FIELD(uint8_t, has_newline);  // of the white space since then
  FIELD(uint8_t, num_spaces);   // likewise: behind the newline, if there is one
  FIELD(uint8_t, indent);       // spaces that the line begins with
  FIELD(uint8_t, indent_step);  // more of them inside of brackets
  FIELD_ARRAY(uint8_t, runs, kGaps);
};

// What a sequence's drafts come from, and what became of those before (drafts.h).
struct Drafting {
  FIELDS_OF(Drafting);
  FIELD(uint64_t, scope);          // whose answers it shares: of Sqe::hash_root; 0: nobody's
  FIELD(uint32_t, num_indexed);    // leading tokens of the text whose n-grams are in the slot's table
  FIELD(uint32_t, source);         // place + 1 of what the next token should equal; 0: to be looked up
  FIELD(uint32_t, num_found);      // tokens of a draft that could be had for the step that is being composed
  FIELD(uint32_t, num_guessed);    // tokens behind the text that its automaton leaves no choice of
  FIELD(uint32_t, guessed_at);     // tokens of the text then
  FIELD(DraftOrigin, origin);      // of the draft that was found
  FIELD(uint32_t, is_prediction);  // whether the draft in flight is of the request's prediction
  FIELD(uint32_t, num_uncharged);  // accepted draft tokens that its flow has still to be charged for
  FIELD_ARRAY(OriginRecord, records, kDraftOrigins);
  FIELD(uint32_t, num_spaced);  // tokens of the text up to which `spacing` is known
  FIELD(Spacing, spacing);
};

// One generation that the scheduler knows; index = queue pair * sequences_per_queue_pair + tag.
// A waiting sequence with blocks is parked; one with a slot but no blocks was preempted and recomputes.
struct Sequence {
  FIELDS_OF(Sequence);
  FIELD(SequenceStatus, status);
  FIELD(uint32_t, queue_pair);
  FIELD(uint32_t, slot);
  FIELD(uint32_t, cancelled);
  FIELD(FinishReason, finish);
  FIELD(uint32_t, admitted);      // the arena was consumed, kAdmitted was sent
  FIELD(uint32_t, num_tokens);    // prompt and generated
  FIELD(uint32_t, num_computed);  // tokens whose KV is in blocks; trails num_tokens by 1 while decoding
  FIELD(uint32_t, num_generated);
  FIELD(uint32_t, num_delivered_logprobs);  // prompt positions whose logprobs were delivered
  FIELD(uint32_t, num_blocks);
  FIELD(uint32_t, num_freed);       // leading blocks that have no window block any more (windows.h)
  FIELD(uint32_t, num_hashed);      // leading blocks whose hash is known
  FIELD(uint32_t, num_registered);  // leading blocks that the prefix cache knows, or has refused
  FIELD(Registration, chain);       // the last of them, or its equal that was there before
  FIELD(uint32_t, snapshot);        // index + 1 of the states that its next row begins with; 0: those of its slot
  FIELD(uint32_t, state_lag);       // accepted draft tokens that its recurrent states have to take in yet
  FIELD(uint32_t, split);           // tokens of the prefix that the cache held without a snapshot; 0: it held none
  FIELD(Row, row);                  // in the step that is composed or in flight, unless that is the paused one
  FIELD(uint32_t, paused_tokens);   // of its row in the layer-segmented step: until that ends, nothing of it moves
  FIELD(uint32_t, skipped_pass);    // the pass of compose() that had no room for it
  FIELD(uint32_t, preemptions);     // how often its blocks were taken while it ran, since its last token
  FIELD(uint64_t, arrival);
  FIELD(uint64_t, queued_ns);     // start of the present wait
  FIELD(uint64_t, waited_ns);     // in all waits before
  FIELD(uint64_t, due_ns);        // of its next token, where it has a target (pacing.h)
  FIELD(uint32_t, adapter_slot);  // with a slot: index + 1 of the model's copy of its adapter; 0: it has none
  FIELD(uint32_t, automaton);     // with a slot: index of the one that constrains it; kNone: none does
  FIELD(Drafting, drafting);
  FIELD(Sqe, sqe);
};

// Tokens whose KV is in blocks once the steps that the sequence takes part in are over.
BLINK_FN uint32_t computed_tokens(const Sequence& q) { return q.num_computed + q.row.num_tokens + q.paused_tokens; }

// The same without drafts, which may be given up.
BLINK_FN uint32_t certain_tokens(const Sequence& q) { return q.num_computed + certain_tokens(q.row) + q.paused_tokens; }

// Whether all its tokens but the newest are computed: then each step gives it another one. Else its prompt is not.
BLINK_FN bool is_decoding(const Sequence& q) { return q.num_computed + 1 == q.num_tokens; }

// Tokens that its flow is charged for with a decode row: one, and the accepted ones of drafts since the last charge.
BLINK_FN uint32_t take_charge(Sequence& q) {
  const uint32_t tokens = 1 + q.drafting.num_uncharged;
  q.drafting.num_uncharged = 0;
  return tokens;
}

// Whether it has a row in the step that is composed or in flight.
BLINK_FN bool takes_part(const Sequence& q) { return q.row.kind != RowKind::kNone; }

// Let a sequence take so many of its next tokens in the step that is composed. The last of all gives a sample.
BLINK_FN void set_row(Sequence& q, RowKind kind, uint32_t num_tokens) {
  q.row.kind = kind;
  q.row.num_tokens = num_tokens;
  q.row.num_samples = num_tokens > 0 && q.num_computed + num_tokens == q.num_tokens;
}

}  // namespace blink
