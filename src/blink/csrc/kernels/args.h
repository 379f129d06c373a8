// SPDX-License-Identifier: Apache-2.0
// The arguments of the kernels that are launched by name, a struct each. The device code includes this file. Python's
// launches find names, offsets and sizes in the library's table (kernels/gpu/arguments.py).
#pragma once

#include "kernels/formats.h"
#include "region/fields.h"

struct uint2;  // CUDA's

namespace blink {

struct AutomatonPlace;
struct BatchHeader;
struct Bf16;
struct SlotParams;

struct alignas(64) TensorMap {  // what cuTensorMapEncodeTiled makes
  FIELDS_OF(TensorMap);
  FIELD_ARRAY(uint64_t, words, 16);
};

// gemm/embedding.cuh
struct EmbedArgs {
  FIELDS_OF(EmbedArgs);
  FIELD(const int*, ids);           // [rows]
  FIELD(const Bf16*, embedding);    // [vocab, hidden]
  FIELD(const Bf16*, norm);         // [hidden]
  FIELD(Bf16*, residual);           // [rows, hidden]
  FIELD(Bf16*, next_x);             // [rows, hidden]: residual * norm; with kWrites hi/lo FP8
  FIELD(float*, next_square_sums);  // [1, tokens]
  FIELD(int, hidden);
};

// gemm/epilogue.cuh
struct OutputArgs {
  FIELDS_OF(OutputArgs);
  FIELD(const Bf16*, bias);          // [n] or null
  FIELD(Bf16*, out);                 // [rows, n]; with kGate and kWrites hi/lo FP8
  FIELD(const float*, square_sums);  // [num_square_sums, kTokens], with kNorm: parts of each row's sum of squares
  FIELD(const Bf16*, next_norm);     // [n], with kAdd
  FIELD(Bf16*, next_x);              // [rows, n], with kAdd: out * next_norm; with kWrites hi/lo FP8
  FIELD(float*, next_square_sums);   // [blocks, kTokens], with kAdd
  FIELD(const float*, scales);       // [weight rows], where each has one
  FIELD(float*, inverse_rms);        // [rows], the norm's, for who else applies it; or null
  FIELD(float, eps);
  FIELD(float, per_k);  // 1 / k
  FIELD(int, n);
  FIELD(int, rows);
  FIELD(int, num_square_sums);
};

// gemm/gemm.cuh, gemm_int4.cuh, gemm_hi_lo.cuh, gemm_hi_lo_int4.cuh
struct GemmArgs {
  FIELDS_OF(GemmArgs);
  FIELD(TensorMap, weight);  // [n, k]; kGate: [2 * n, k], gates first
  FIELD(TensorMap, x);       // [rows, k]
  FIELD(OutputArgs, output);
  FIELD(int, stages);              // of all of k
  FIELD(int, num_groups);          // of a row of a quantized weight; gemm_hi_lo.cuh
  FIELD(const unsigned*, groups);  // [weight rows, num_groups]
};

// gemm/shrink.cuh
struct ShrinkArgs {
  FIELDS_OF(ShrinkArgs);
  FIELD(const Bf16*, x);        // [rows, k]
  FIELD(const Bf16*, down);     // [places, width, k]
  FIELD(const int*, places);    // [rows], 1 + a row's place, 0: it has none
  FIELD(const int*, distinct);  // the places of rows, each once, and zeros: at least the grid's ways
  FIELD(Bf16*, found);          // [rows, width]; undefined of rows that have no place
  FIELD(unsigned*, begun);      // becomes `turn` when the kernels in front have ended
  FIELD(long, down_stride);     // elements from one place to the next
  FIELD(int, turn);             // of the step's launches of this kernel, from 1
  FIELD(int, k);
  FIELD(int, width);
  FIELD(int, rows);
};

// gemm/gemm_updated.cuh
struct UpdateArgs {
  FIELDS_OF(UpdateArgs);
  FIELD(const Bf16*, up);     // [places, weight rows, rank]
  FIELD(const int*, parts);   // [weight rows / tile], which `rank` columns of found belong to a tile
  FIELD(const int*, places);  // as of ShrinkArgs, and what follows
  FIELD(const int*, distinct);
  FIELD(const Bf16*, found);
  FIELD(const unsigned*, begun);
  FIELD(long, up_stride);
  FIELD(int, turn);
  FIELD(int, rank);  // a multiple of 16
  FIELD(int, width);
  FIELD(int, tile);
};

struct UpdatedGemmArgs {
  FIELDS_OF(UpdatedGemmArgs);
  FIELD(GemmArgs, gemm);
  FIELD(UpdateArgs, update);
};

// gemm/gemv.cuh, gemv_quantized.cuh, gemv_int4.cuh
struct GemvArgs {
  FIELDS_OF(GemvArgs);
  FIELD(const Bf16*, weight);      // [n, k]; kGate: [2 * n, k], gates first
  FIELD(const Bf16*, bias);        // [n] or null
  FIELD(const Bf16*, x);           // [rows, k]
  FIELD(const void*, norm);        // [k], with kNorm; Bf16 or float
  FIELD(Bf16*, out);               // [rows, n], n at least a tile's outputs
  FIELD(const float*, scales);     // [weight rows], of weights of 8 bits; gemv_quantized.cuh
  FIELD(const unsigned*, groups);  // [weight rows, k / kGroup], in place of scales
  FIELD(float, eps);
  FIELD(int, n);
};

// moe/grouped_gemm.cuh
struct GroupedArgs {
  FIELDS_OF(GroupedArgs);
  FIELD(TensorMap, weight);     // [experts * halves, n, k]; kGate: halves are gate and up
  FIELD(TensorMap, x);          // [2, experts * places, k], hi and lo, or one of bf16
  FIELD(const int*, counts);    // [experts], rows that chose an expert
  FIELD(const int*, pairs);     // kStore: [experts, places], where in out they go
  FIELD(const float*, scales);  // [experts, weight_rows], of FP8
  FIELD(Bf16*, out);  // kGate: [experts * places, n], silu(gate) * up, or hi/lo FP8 of them; kStore: [pairs, n]
  FIELD(int, experts);
  FIELD(int, places);
  FIELD(int, n);
  FIELD(int, stages);  // of all of k
};

// moe/permutation.cuh
struct PermutationArgs {
  FIELDS_OF(PermutationArgs);
  FIELD(const Bf16*, logits);        // [rows, experts]
  FIELD(const int*, num_tokens);     // [1]; rows beyond it choose no expert
  FIELD(const Bf16*, x);             // [rows, hidden], times the norm's weight
  FIELD(const float*, inverse_rms);  // [rows], the norm's; null: x is normalised
  FIELD(float*, weights);            // [rows * kTopK], probability of each pair's expert; pairs are row * kTopK + rank
  FIELD(int*, pairs);                // [experts, places], an expert's
  FIELD(int*, counts);               // [experts]
  FIELD(Bf16*, out);                 // [experts * places, hidden], or hi/lo FP8 of it
  FIELD(int, rows);
  FIELD(int, experts);
  FIELD(int, hidden);
  FIELD(int, places);
};

// moe/moe_routing.cuh
struct RoutingArgs {
  FIELDS_OF(RoutingArgs);
  FIELD(const Bf16*, logits);       // [rows, kExperts]
  FIELD(const int*, context_lens);  // [rows]; rows without context are padding and choose no expert
  FIELD(int, renormalize);          // whether the chosen experts' weights add up to 1
};

// moe/moe_gate.cuh
struct MoeGateArgs {
  FIELDS_OF(MoeGateArgs);
  FIELD(RoutingArgs, routing);
  FIELD(const Bf16*, weight);  // [kExperts, 2 * kSize, kK], gates first
  FIELD(const Bf16*, x);       // [rows, kK]
  FIELD(const void*, norm);    // [kK], Bf16 or float
  FIELD(Bf16*, out);  // [rows * kTopK, kSize]; a row's chosen experts in order; quantized f16, over kActivationDivisor
  FIELD(const unsigned*, words);  // [kExperts, S::words, 2 * kSize], of quantized weights
  FIELD(float, eps);
};

// moe/moe_down.cuh
struct MoeDownArgs {
  FIELDS_OF(MoeDownArgs);
  FIELD(RoutingArgs, routing);
  FIELD(const Bf16*, weight);  // [kExperts, n, kSize]
  FIELD(const Bf16*, x);       // [rows * kTopK, kSize], as moe_gate leaves it
  FIELD(Bf16*, residual);      // [rows, n]
  // With more rows the inputs of the next norm, as output.cuh leaves them; next_norm is null with few.
  FIELD(const Bf16*, next_norm);    // [n]
  FIELD(Bf16*, next_x);             // [rows, n], or hi/lo FP8
  FIELD(float*, next_square_sums);  // [blocks, kMaxMoeRows]
  FIELD(const unsigned*, words);    // [kExperts, S::words, n], of quantized weights
  FIELD(int, n);
  FIELD(FormatId, hi_lo);  // that next_x is
};

// attention/attention.cuh
struct AttentionArgs {
  FIELDS_OF(AttentionArgs);
  FIELD(TensorMap, cells);  // the cache as [2, kv_heads, parts of a head, blocks * block_size, box_row]
  FIELD(const Bf16*, qkv);  // [rows, (kGroup + 2) * kv_heads * head_dim]
  FIELD(void*, cache);      // [2, blocks, block_size, kv_heads, head_dim], bf16 or e4m3
  FIELD(long, values);      // elements from keys to values
  FIELD(const int*, block_tables);
  FIELD(const int*, row_slots);     // [rows]
  FIELD(const int*, context_lens);  // [rows]; with the new token, 0 for padding
  FIELD(const int*, positions);     // [rows]
  FIELD(const int*, kv_slots);      // [rows]; where the new key and value go, -1: nowhere
  FIELD(const float*, rotary);      // [positions, kRotaryDim], cosines before sines
  FIELD(const Bf16*, query_norm);   // [head_dim], with kNorm
  FIELD(const Bf16*, key_norm);
  FIELD(Bf16*, out);  // [rows, kGroup * kv_heads * head_dim]; with kWrites hi/lo FP8
  FIELD(float, eps);
  FIELD(float, scale);  // of the scores, for powers of 2
  // Of FP8: what keys and values are multiplied by, and values once more.
  FIELD(float, key_rate);
  FIELD(float, value_rate);
  FIELD(float, value_scale);
  FIELD(int, table_stride);
};

// sampler/sample.cu
struct SampleArgs {
  FIELDS_OF(SampleArgs);
  FIELD(const void*, logits);  // [rows, stride]
  FIELD(const BatchHeader*, header);
  FIELD(const int32_t*, row_slots);
  FIELD(const int32_t*, context_lens);
  FIELD(const SlotParams*, params);
  FIELD(const int32_t*, tokens);  // [slots, max_model_len]
  FIELD(const int32_t*, stop_tokens);
  FIELD(const int32_t*, bias_tokens);
  FIELD(const float*, bias_values);
  FIELD(const uint32_t*, allowed);  // lists of tokens, a bit for each
  FIELD(const int32_t*, lists);     // [rows]; the row's in `allowed`, or -1
  FIELD(const int32_t*, may_end);   // [rows]
  FIELD(uint32_t*, changes);        // [rows, most_changes()], memory for changed logits
  FIELD(int32_t*, sampled_tokens);  // [rows]
  FIELD(float*, sampled_logprobs);
  FIELD(int32_t*, top_tokens);  // [rows, kMaxLogprobs]
  FIELD(float*, top_logprobs);
  FIELD(uint32_t, stride);
  FIELD(uint32_t, vocab_size);
  FIELD(uint32_t, max_model_len);
  FIELD(uint32_t, change_words);  // of a block, at least its part's; an even number
};

// prefill/gemm_int4.cu
struct PrefillGemmArgs {
  FIELDS_OF(PrefillGemmArgs);
  // [n, k / 2] bytes, in boxes of 128 rows; of the fused gate-up [2, n, k / 2], in boxes of two eights
  FIELD(TensorMap, weight);
  FIELD(TensorMap, x);         // [rows, k], in boxes of a block's tokens
  FIELD(const uint2*, words);  // of the groups of a unit, of each weight row
  FIELD(Bf16*, out);           // [rows, n]; of the fused gate-up silu(gate) * up
  FIELD(int, n);
  FIELD(int, rows);
  FIELD(int, units);  // of k
};

// prefill/gate_up.cu
struct GateUpArgs {
  FIELDS_OF(GateUpArgs);
  FIELD(TensorMap, weight);  // [2, outputs, k], in boxes of a tile's gate and up rows
  FIELD(TensorMap, x);       // [rows, k], in boxes of what a block copies
  FIELD(Bf16*, out);         // [rows, outputs]
  FIELD(int, outputs);
  FIELD(int, rows);
  FIELD(int, boxes);  // of k
};

// prefill/attention.cu, attention/latent.cu
struct PromptArgs {
  FIELDS_OF(PromptArgs);
  FIELD(TensorMap, cells);    // the cache as [2 or 1, groups of 8 tokens, parts of heads, 8 tokens, 64]
  FIELD(const Bf16*, query);  // [tokens, kv_heads * group, size of a key]
  FIELD(const int*, block_tables);
  FIELD(const int*, items);  // [grid's second, kItemWords]
  FIELD(int*, counters);     // [partials, kv_heads]; at a tile's first partial result, how many are there
  FIELD(float*, partials);   // [partials, kv_heads, pairs of a tile, size of a value]
  FIELD(float*, lses);       // [partials, kv_heads, pairs of a tile]; log2 of the sum of exponentials
  FIELD(Bf16*, out);         // [tokens, kv_heads * group * size of a value]
  FIELD(float, scale);       // of the scores, for powers of 2
  FIELD(int, table_stride);
};

// constrain.cu
struct ConstrainArgs {
  FIELDS_OF(ConstrainArgs);
  FIELD(const BatchHeader*, header);
  FIELD(const int32_t*, row_slots);
  FIELD(const int32_t*, context_lens);
  FIELD(const SlotParams*, params);
  FIELD(const int32_t*, tokens);
  FIELD(const int32_t*, stop_tokens);
  FIELD(const uint8_t*, automata);
  FIELD(AutomatonPlace*, places);
  FIELD(const uint32_t*, token_starts);
  FIELD(const uint8_t*, token_text);
  FIELD(uint32_t*, bits);    // [slots * num_lists, words]
  FIELD(int32_t*, lists);    // [rows], the row's list in `bits`; kNoIndex: nothing is allowed, or all
  FIELD(int32_t*, may_end);  // [rows]
  // [rows], index in `places` of what the row's list is to be made for; kNoIndex: it is made
  FIELD(int32_t*, new_places);
  FIELD(uint32_t, max_model_len);
  FIELD(uint32_t, vocab_size);
  FIELD(uint32_t, words);
  FIELD(uint32_t, num_lists);     // of a slot, and of its places
  FIELD(uint32_t, shared_bytes);  // of dynamic shared memory in a block of list_allowed_tokens()
};

// recurrent/delta_decode.cu
struct DeltaDecodeArgs {
  FIELDS_OF(DeltaDecodeArgs);
  FIELD(const Bf16*, qkv);       // [rows, channels]: q, k and v of all heads
  FIELD(const Bf16*, z);         // [rows, v_heads * v_dim]
  FIELD(const Bf16*, b);         // [rows, v_heads]
  FIELD(const Bf16*, a);         // [rows, v_heads]
  FIELD(const Bf16*, conv);      // [kConvWidth, channels], the newest input last
  FIELD(const float*, rate);     // [v_heads]: -exp(A_log)
  FIELD(const float*, dt_bias);  // [v_heads]
  FIELD(const float*, norm);     // [v_dim]
  FIELD(const int*, slots);      // [rows]; below 0: padding, nothing is written
  FIELD(const int*, positions);  // [rows]; 0: the slot counts as zeros
  FIELD(float*, states);         // [slots, v_heads, k_dim, v_dim]
  FIELD(Bf16*, inputs);          // [slots, kConvWidth, channels]; that of position p at p % kConvWidth
  FIELD(Bf16*, out);             // [rows, v_heads * v_dim]
  FIELD(int, qkv_stride);        // elements from one row to the next, here and below
  FIELD(int, z_stride);
  FIELD(int, b_stride);
  FIELD(int, a_stride);
  FIELD(float, eps);
};

// recurrent/invert.cu
struct InvertArgs {
  FIELDS_OF(InvertArgs);
  FIELD(const float*, below);   // [matrices, 64, 64]: what is below the diagonal, and zeros
  FIELD(const float*, factor);  // [matrices, 64]: of the inverse's columns
  FIELD(Bf16*, out);            // [matrices, 64, 64]
  FIELD(int, matrices);
};

}  // namespace blink
