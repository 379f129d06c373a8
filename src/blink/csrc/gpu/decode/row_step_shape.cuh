// SPDX-License-Identifier: Apache-2.0
// What the parts of row_step.cuh share: arguments, sizes and shared memory.
#pragma once

#include "attention.cuh"
#include "gemv_int4.cuh"
#include "words.cuh"

namespace blink {

constexpr int kStepWarps = 8, kStepThreads = 32 * kStepWarps;  // that compute
// They fill the ring's slots in turn; one alone starts copies at a lower rate than the memory brings them. A slot is
// always the same warp's, so that nobody waits for a phase of it before the one in front has begun.
constexpr int kCopyWarps = 4;
constexpr int kStageRows = 8, kStageBytes = 2048;  // of each row
constexpr int kMostGroups = 32;                    // of weight rows, that are multiplied and added up together
constexpr int kAttendWarps = 4;
constexpr int kAheadOutput = 16, kAheadGate = 16, kAheadDown = 16, kAheadQkv = 24;  // stages that are brought to L2
constexpr int kStepRegisters = 224, kCopyRegisters = 56;                            // of a thread

// How weights lie: rows of bf16, or of e4m3; packed as quantized.cuh says, of e4m3 or 4 bits. Those of e4m3 have a
// scale for each row.
enum class Form { kBf16, kFp8Rows, kFp8, kInt4 };

// What a warp multiplies at once of a row.
template <Form kForm>
constexpr int kChunkBytes = kForm == Form::kBf16 || kForm == Form::kFp8Rows ? 64 : kUnitBytes;
template <Form kForm>
constexpr int kChunkK = kForm == Form::kBf16   ? kChunkBytes<kForm> / 2
                        : kForm == Form::kInt4 ? kChunkBytes<kForm> * 2
                                               : kChunkBytes<kForm>;
template <Form kForm>
constexpr int kStageK = kStageBytes / kChunkBytes<kForm> * kChunkK<kForm>;
// From one row of a stage to the next, against bank conflicts: two rows' 16 bytes of four lanes each are read at once,
// of packed rows every second 16 bytes.
constexpr int kMostPitch = kStageBytes + 64;
template <Form kForm>
constexpr int kPitch = kForm == Form::kBf16 || kForm == Form::kFp8Rows ? kMostPitch : kStageBytes + 16;
// Stages that rows of kK take.
template <Form kForm, int kK>
constexpr int kTurns = (kK + kStageK<kForm> - 1) / kStageK<kForm>;
template <Form kForm>
constexpr bool kHasScales = kForm == Form::kFp8 || kForm == Form::kFp8Rows;

struct Matrix {
  const char* values;
  const float* scales;     // [rows], of e4m3
  const unsigned* groups;  // [rows, k / kGroup], of 4 bits
};

struct LayerArgs {
  AttentionArgs attention;                // but for qkv and out
  Matrix qkv, output, gate_up, down;      // gates before ups; of experts one below the other
  Matrix router;                          // of experts
  const Bf16 *attention_norm, *mlp_norm;  // [hidden]
  const Bf16* qkv_bias;                   // or null
};

struct RowStepArgs {
  const LayerArgs* layers;
  const Bf16* residual;  // [hidden], the embedding
  const Bf16* norm;      // [hidden]
  Matrix lm_head;
  Bf16* logits;          // [vocab]
  Word* words;           // RowStepShape::words of them, zero before the first step
  Handovers* handovers;  // zero before the first step
  float eps;
  int num_layers, vocab;
  int renormalize;  // of experts: whether the chosen ones' weights add up to 1
};

// kExperts: 0 without; kMlp is then the width of the MLP, else of an expert. kForm: of the layers' matrices, but for
// the router; kExpertForm, kHeadForm: of experts, and of the output.
template <Form kForm, Form kExpertForm, Form kHeadForm, int kHidden, int kMlp, int kExperts, int kTopK, int kQueries,
          int kKvHeads, int kHeadDim, int kRotaryDim, int kBlockSize, int kParts, int kSlots, bool kHeadNorm>
struct RowStepShape {
  // Each KV head's keys are shared by kParts blocks.
  using Attention =
      AttentionShape<kQueries, kHeadDim, kRotaryDim, kKvHeads, kBlockSize, kParts, kAttendWarps, 1, kHeadNorm, false>;
  static constexpr Form form = kForm, head_form = kHeadForm;
  static constexpr Form mlp_form = kExperts ? kExpertForm : kForm;
  static constexpr int hidden = kHidden, experts = kExperts, top_k = kExperts ? kTopK : 1, slots = kSlots;
  static constexpr int width = kMlp, mlp = kMlp * top_k;  // of an expert, and of all that are chosen
  static constexpr int parts = kParts, kv_heads = kKvHeads;
  static constexpr int attended = kQueries * kKvHeads * kHeadDim, qkv = attended + 2 * kKvHeads * kHeadDim;
  static constexpr int widest = mlp > attended ? mlp : attended, most_k = widest > kHidden ? widest : kHidden;
  static constexpr bool has_groups = kForm == Form::kInt4 || kHeadForm == Form::kInt4;
  // Where words lie.
  static constexpr int of_qkv = 0, of_attended = of_qkv + qkv / 2, of_middle = of_attended + attended / 2,
                       of_gated = of_middle + kHidden / 2, of_residual = of_gated + mlp / 2,
                       of_parts = of_residual + kHidden / 2,
                       of_weights = of_parts + kKvHeads * kParts * kParts * Attention::share,
                       of_logits = of_weights + kKvHeads * kParts * kQueries * 2, words = of_logits + kExperts / 2;
  static_assert(kHidden % kChunkK<kForm> == 0 && kHidden % kChunkK<mlp_form> == 0 && kHidden % kChunkK<kHeadForm> == 0);
  static_assert(kMlp % kChunkK<mlp_form> == 0 && attended % kChunkK<kForm> == 0 && qkv % kStageRows == 0);
  static_assert(kHidden % kStageRows == 0 && kMlp % 4 == 0 && kExperts % 32 == 0);
  static_assert(Attention::share * kParts == Attention::outputs && Attention::share % 4 == 0);
  static_assert(kSlots % kCopyWarps == 0);
  static_assert(!kExperts || kMlp <= kStageK<mlp_form>);
};

template <bool kHasGroups>
struct Stage {
  alignas(16) char rows[kStageRows * kMostPitch];
  alignas(16) float scales[kStageRows];
};

template <>
struct Stage<true> : Stage<false> {
  alignas(16) unsigned groups[kStageRows][kStageK<Form::kInt4> / kGroup + 4];  // padded like rows
};

// A product's input, as the matrix instruction takes it. A lane of four reads vectors.
template <int kMostK>
union Input {
  Vec16 plain[kMostK / 8];       // bf16, or f16 for rows of e4m3
  Vec16 halves[kMostK / 32][4];  // f16 for packed e4m3: of each 32 k
  struct {
    Vec16 whole[kMostK / 32][4];
    Int4Group groups[kMostK / kGroup];
  } cut;
};

// The experts that the row has chosen, in order.
template <int kTopK>
struct Chosen {
  int experts[kTopK];
  float weights[kTopK];
};

template <class S>
struct RowStepShared {
  alignas(1024) AttentionShared<typename S::Attention> attention;
  alignas(128) Stage<S::has_groups> ring[S::slots];
  alignas(16) Input<S::most_k> x;
  float sums[kMostGroups][kStepWarps][kStageRows];
  float squares[kStepWarps];
  float inverse[2];  // of what f16 were multiplied by, of an input without and of one with a norm: they alternate
  unsigned largest[kStepWarps];
  Chosen<S::top_k> chosen;
  alignas(8) Barrier full[S::slots], empty[S::slots], routed;
};

// The groups of weight rows, of so many, that are this block's.
struct GroupShare {
  int first, last;

  __device__ explicit GroupShare(int groups)
      : first(int(long(groups) * blockIdx.x / gridDim.x)), last(int(long(groups) * (blockIdx.x + 1) / gridDim.x)) {}

  // Some of them.
  __device__ GroupShare(int first, int last) : first(first), last(last) {}

  __device__ int count() const { return last - first; }

  // Let a function take them, no more than kMostGroups at a time.
  template <class Take>
  __device__ void take_parts(Take take) const {
    for (int from = first; from < last; from += kMostGroups) take(GroupShare(from, min(from + kMostGroups, last)));
  }
};

}  // namespace blink
