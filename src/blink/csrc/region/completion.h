// SPDX-License-Identifier: Apache-2.0
// The entries of a completion queue: what the scheduler tells of a sequence. writer: scheduler.
#pragma once

#include "region/codes.h"
#include "region/fields.h"

namespace blink {

// CqeTag::rank's low bits of a kToken that is the predicted one; n more: it is not, and n predicted tokens were given
// up there.
constexpr uint32_t kAcceptedRank = 1;
constexpr uint32_t kPredictedBits = 5;
constexpr uint32_t kMaxToldPreemptions = 7;

// The bytes of Cqe::tag.
struct CqeTag {
  FIELDS_OF(CqeTag);
  FIELD(uint8_t, phase);  // 0 or 1
  FIELD(CqeKind, kind);
  FIELD(FinishReason, finish_reason);
  // Of a kTopLogprob. Of a kToken: kPredictedBits for its request's prediction, and above them how often the sequence
  // was preempted since its last token, up to kMaxToldPreemptions. Of a kFinished: the latter.
  FIELD(uint8_t, rank);
};
BLINK_FN uint32_t tag_word(CqeTag tag) { return __builtin_bit_cast(uint32_t, tag); }
BLINK_FN CqeTag tag_of(uint32_t word) { return __builtin_bit_cast(CqeTag, word); }

// Completion queue entry. writer: scheduler; `tag` (a CqeTag) is stored last, with release.
struct alignas(32) Cqe {
  FIELDS_OF(Cqe);
  FIELD(uint64_t, sequence);
  FIELD(uint64_t, time_ns);
  FIELD(int32_t, token);  // kAdmitted: prompt tokens found in the prefix cache; kRejected: RejectCode
  FIELD(float, logprob);
  FIELD(uint32_t, index);  // ordinal of the generated token; kPromptLogprob: place in the prompt
  FIELD(uint32_t, tag);
};
static_assert(sizeof(Cqe) == 32, "two CQEs share a cache line");

// The CQE of kind kVector: a part of what a prompt became. Its words have the places of a Cqe's.
constexpr uint32_t kValuesOfCqe = 4;
struct alignas(32) VectorCqe {
  FIELDS_OF(VectorCqe);
  FIELD(uint64_t, sequence);
  FIELD_ARRAY(float, values, kValuesOfCqe);  // behind the last of the vector: 0
  FIELD(uint32_t, index);                    // place of the first of them in the vector
  FIELD(uint32_t, tag);
};
static_assert(sizeof(VectorCqe) == sizeof(Cqe));

BLINK_FN uint32_t cq_phase(uint32_t position, uint32_t entries) { return (position / entries + 1) & 1; }

}  // namespace blink
