// SPDX-License-Identifier: Apache-2.0
// The sampling parameters, one line each. The SQE's struct, the scheduler's check, SamplingParams' checks and defaults,
// the values that the API takes and the table of docs/sampling.md are made of these lines.
#pragma once

#include "region/fields.h"

namespace blink {

constexpr uint32_t kMaxLogprobs = 20;

enum class Low : bool { kIn, kOut };  // whether the range holds its lower end

// PARAM(type, name, default, Low, low, high, meaning). Greedy sampling apart, a default asks for nothing.
#define SAMPLING_PARAMS(PARAM)                                                                                         \
  PARAM(float, temperature, 1, Low::kIn, 0, 100, "Divides the logits. 0 is greedy: the likeliest token.")              \
  PARAM(float, top_p, 1, Low::kOut, 0, 1, "Keeps the likeliest tokens that together have this probability.")           \
  PARAM(float, min_p, 0, Low::kIn, 0, 1, "Keeps tokens with at least this share of the likeliest one's probability.")  \
  PARAM(float, repetition_penalty, 1, Low::kOut, 0, 1e6, "Divides positive logits of tokens seen, multiplies others.") \
  PARAM(float, presence_penalty, 0, Low::kIn, -2, 2, "Is subtracted from the logits of generated tokens.")             \
  PARAM(float, frequency_penalty, 0, Low::kIn, -2, 2, "The same, once for each time that a token was generated.")      \
  PARAM(int32_t, top_k, 0, Low::kIn, -1, 0x7fffffff, "Keeps this many of the likeliest tokens. 0 and -1: all.")

// What the model's kernels need to know of how a sequence is sampled: copied whole from the SQE to the slot.
// SamplingParams of Python gives each field by its name.
struct Sampling {
  FIELDS_OF(Sampling);
#define SAMPLING_FIELD(type, name, ...) FIELD(type, name);
  SAMPLING_PARAMS(SAMPLING_FIELD)
#undef SAMPLING_FIELD
  FIELD(uint32_t, seed_low);
  FIELD(uint32_t, seed_high);
  FIELD(int32_t, num_logprobs);          // -1: none
  FIELD(uint32_t, named_logprobs);       // of these, those of the first biases' tokens; 0: of the best ones
  FIELD(uint32_t, num_prompt_logprobs);  // completions for each prompt token: its logprob and its rivals'; 0: none
  FIELD(uint32_t, min_tokens);
  FIELD(uint32_t, reasoning_limit);  // 1 + the generated tokens behind which reasoning is closed; 0: it may be any
  FIELD(int32_t, reasoning_open);    // the token that it begins with; -1: the prompt has begun it
  FIELD(int32_t, reasoning_close);   // the token that ends it; one that is none of the vocabulary does nothing
};

// NaN fails every comparison, so it is never within.
template <class T>
BLINK_FN bool within(T value, T low, T high) {
  return value >= low && value <= high;
}

BLINK_FN bool valid_sampling(const Sampling& e) {
#define IS_WITHIN(type, name, usual, low_end, low, high, meaning) \
  within(e.name, type(low), type(high)) && (low_end == Low::kIn || e.name > type(low)) &&
  return SAMPLING_PARAMS(IS_WITHIN) within(e.num_logprobs, -1, int32_t(kMaxLogprobs)) &&
         (e.named_logprobs == 0 || int64_t(e.named_logprobs) == e.num_logprobs) &&
         e.num_prompt_logprobs <= 1 + kMaxLogprobs;
#undef IS_WITHIN
}

}  // namespace blink
