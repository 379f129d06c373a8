// SPDX-License-Identifier: Apache-2.0
// The arguments of the kernels by which the ranks of a tensor-parallel group exchange numbers, as args.h has others'.
#pragma once

#include "region/fields.h"

namespace blink {

// comm/exchange.cuh: a rank's end of its tensor-parallel group
struct RankArgs {
  FIELDS_OF(RankArgs);
  FIELD(const uint64_t*, boxes);  // [size]: the address of each rank's box; what others send to it goes there
  FIELD(int, lines);              // that a box has for each sender and parity
  FIELD(int, pieces);             // of 8 bytes, that a box has for each sender, parity and phase of a two-shot exchange
  FIELD(int, rank);
  FIELD(int, size);
  FIELD(int, op);  // number of the exchange in its step
};

// comm/all_reduce.cu
struct AllReduceArgs {
  FIELDS_OF(AllReduceArgs);
  FIELD(RankArgs, ranks);
  FIELD(const void*, partial);  // [rows, width], the rank's summand
  FIELD(const void*, norm);     // [width], of a norm
  FIELD(void*, residual);       // [rows, width], with a norm: the sum is added to it
  FIELD(void*, out);            // [rows, width]: the sum, or the norm of the residual
  FIELD(int, count);            // numbers in all; the last row may be shorter
  FIELD(int, width);
  FIELD(float, eps);
};

// comm/two_shot.cu
struct TwoShotArgs {
  FIELDS_OF(TwoShotArgs);
  FIELD(RankArgs, ranks);
  FIELD(const void*, partial);  // the rank's summand
  FIELD(void*, out);            // the sum
  FIELD(int, count);            // numbers of each
};

struct JoinArgs {
  FIELDS_OF(JoinArgs);
  FIELD(RankArgs, ranks);
  FIELD(const void*, part);   // [rows, the rank's columns]
  FIELD(void*, out);          // [rows, starts[size]] of the first rank; else null
  FIELD(const int*, starts);  // [size + 1], of each rank's columns
  FIELD(int, rows);
};

// comm/pull_batch.cu
struct PullArgs {
  FIELDS_OF(PullArgs);
  FIELD(const uint8_t*, source);        // the scheduler's state, on another GPU
  FIELD(uint8_t*, to);                  // this GPU's copy, whose arrays lie alike
  FIELD(const int*, spans);             // [num_spans, 2]: where one begins and how long it is, in words
  FIELD(const int32_t*, row_slots);     // [rows], of the scheduler's
  FIELD(const int32_t*, context_lens);  // [rows]
  FIELD(const int32_t*, tables);        // [slots, max_blocks]
  FIELD(int32_t*, own_tables);
  FIELD(const int32_t*, window_tables);  // the same of window blocks, or null
  FIELD(int32_t*, own_window_tables);
  FIELD(const uint32_t*, params);  // [slots, param_words], of which one word is copied, or null
  FIELD(uint32_t*, own_params);
  FIELD(int, num_spans);
  FIELD(int, max_blocks);
  FIELD(int, block_size);
  FIELD(int, param_words);
  FIELD(int, param);  // which of them it is
};

// comm/all_reduce.cu
struct EndStepArgs {
  FIELDS_OF(EndStepArgs);
  FIELD(RankArgs, ranks);    // op: how many exchanges the step had
  FIELD(uint32_t*, failed);  // StepOutput's, which is told of a rank that is lost
};

}  // namespace blink
