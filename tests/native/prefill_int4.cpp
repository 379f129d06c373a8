// SPDX-License-Identifier: Apache-2.0
// csrc/kernels/prefill/gemm_int4.cu on the host's threads behind a C API, one cluster of blocks after the other.
#include "gpu_matrices.h"
#include "kernels/prefill/gemm_int4.cu"

using namespace blink;

struct Tensors {
  const char *weight, *x, *words;
  char* out;
};

// n: weight rows.
template <int kTokens, int kSplit, bool kGated>
static void run(const Tensors& tensors, int n, int rows, int k) {
  using S = PrefillGemmShape<kTokens, kSplit, kGated>;
  PrefillGemmArgs args{};
  args.n = kGated ? n / 2 : n, args.rows = rows, args.units = k / kUnit<FormatId::kInt4>;
  args.weight = Boxes{tensors.weight, {k / 2}, {kTileRows}, n, 1};
  if (kGated) args.weight = Boxes{tensors.weight, {k / 2, args.n * (k / 2l)}, {8, 2}, args.n, 1};
  args.x = Boxes{tensors.x, {k}, {kTokens}, rows, 2};
  args.words = reinterpret_cast<const uint2*>(tensors.words), args.out = reinterpret_cast<Bf16*>(tensors.out);
  const unsigned tiles = (n + kTileRows - 1) / kTileRows;
  gridDim = {tiles * kSplit, unsigned((rows + kTokens - 1) / kTokens)};
  for (unsigned i = 0; i < tiles * gridDim.y; i++) {
    phases.clear();
    for (auto& of_block : multiplying) of_block = std::make_unique<std::barrier<>>(kMultiplyingWarps * 32);
    run_cluster(kSplit, kMultiplyingWarps * 32 + 128, sizeof(PrefillGemmShared<S>), [&] {
      blockIdx = {i % tiles * kSplit + block_rank, i / tiles};
      multiply_prompts<kTokens, kSplit, kGated>(args);
    });
  }
}

template <bool kGated>
static void run(const Tensors& tensors, int split, int n, int rows, int k) {
  if (split == 1) return run<64, 1, kGated>(tensors, n, rows, k);
  if (split == 2) return run<64, 2, kGated>(tensors, n, rows, k);
  std::abort();
}

extern "C" void multiply(const Tensors* tensors, bool gated, int split, int n, int rows, int k) {
  gated ? run<true>(*tensors, split, n, rows, k) : run<false>(*tensors, split, n, rows, k);
}
