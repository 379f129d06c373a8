// SPDX-License-Identifier: Apache-2.0
// What cpu/layers.h is told of a step and of its layers.
#pragma once

#include <cstdint>

#include "region/fields.h"

namespace blink {

struct GgufWeight;

// A layer of attention and a gated MLP, of weights in GGUF's blocks.
struct DenseLayer {
  FIELDS_OF(DenseLayer);
  FIELD(const float*, attention_norm);  // [hidden]
  FIELD(const float*, mlp_norm);
  FIELD(const GgufWeight*, qkv);
  FIELD(const GgufWeight*, output);
  FIELD(const GgufWeight*, gate_up);
  FIELD(const GgufWeight*, down);
  FIELD(const float*, qkv_bias);    // may be null
  FIELD(const float*, query_norm);  // [head_dim] of each head; null without such norms
  FIELD(const float*, key_norm);
  FIELD(const float*, sinks);  // [heads], may be null
  FIELD(void*, cells);         // [2, cache_rows, kv_heads, head_dim]
  FIELD(uint64_t, cache_rows);
  FIELD(uint32_t, rotation);  // which of the step's rotations is the layer's
  FIELD(uint32_t, group);     // which of the step's groups
  FIELD(uint32_t, heads);     // of queries
  FIELD(uint32_t, kv_heads);
  FIELD(uint32_t, head_dim);
  FIELD(uint32_t, window);  // 0 if there is none
  FIELD(float, scale);
  FIELD(float, softcap);
  FIELD(float, head_eps);
};

// Where a step's keys go, and where those are that its rows see: of layers with one window.
struct KeyGroup {
  FIELDS_OF(KeyGroup);
  FIELD(const int32_t*, slots);      // [rows]
  FIELD(const int32_t*, blocks);     // [rows, row_blocks]
  FIELD(const int64_t*, positions);  // [rows]
  FIELD(uint64_t, row_blocks);
};

// A step's tokens, each of which is a row.
struct DenseStep {
  FIELDS_OF(DenseStep);
  FIELD(float*, residual);                // [rows, hidden]
  FIELD(float*, update);                  // [rows, hidden], what the last layer's MLP adds to the residual
  FIELD(const float* const*, rotations);  // of each: [rows, rotary_dim]
  FIELD(const KeyGroup*, groups);
  FIELD(uint32_t, rows);
  FIELD(uint32_t, hidden);
  FIELD(uint32_t, rotary_dim);
  FIELD(uint32_t, block_size);
  FIELD(uint32_t, is_half);  // the cache is float16
  FIELD(uint32_t, rounds);   // activations are rounded to 16 bits
  FIELD(float, eps);
};

}  // namespace blink
