// SPDX-License-Identifier: Apache-2.0
// csrc/kernels/gemm/shrink.cuh and gemm_updated.cuh on the host's threads behind a C API, one cluster of blocks after
// the other.
#include "gpu_updates.h"
#include "kernels/gemm/gemm_updated.cuh"

#undef __shared__  // shrink's own variable is each block's
#define __shared__                                              \
  Shared& shared = *reinterpret_cast<Shared*>(block->shared()); \
  if (false) [[maybe_unused]]
#include "kernels/gemm/shrink.cuh"

using namespace blink;

struct Sizes {
  int output, rows, n, k, rank, parts, tile, ways, num_square_sums;
};

struct Tensors {
  const Bf16 *weight, *x, *down, *up;
  const int *part_of_tile, *places, *distinct;
  const Bf16 *bias, *residual, *next_norm;
  const float* square_sums;
  Bf16 *found, *out, *next_x;  // full of what is no number
  float* next_square_sums;
};

constexpr int kTurn = 3;

template <class T>
static std::vector<T> hide(long count) {
  std::vector<T> hidden(count);
  std::memset(static_cast<void*>(hidden.data()), 0xff, count * sizeof(T));  // no number
  return hidden;
}

template <int kTokens>
static void run_shrink(const ShrinkArgs& args, int ways) {
  gridDim = {unsigned(args.width / kShrinkRows * 8), unsigned(ways)};
  for (unsigned y = 0; y < gridDim.y; y++)
    for (unsigned first = 0; first < gridDim.x; first += 8)
      run_cluster(8, 128, sizeof(ShrinkShared<kTokens, 8, 4>), [&] {
        blockIdx = {first + block_rank, y};
        shrink<kTokens, 8, 4>(args);
      });
}

template <int kTokens, int kGroups, int kCluster, int kStageK, Output kOutput>
static void run(const Tensors& t, const Sizes& sizes) {
  constexpr bool norm = kOutput != Output::kAdd;
  using S = GemmShape<kTokens, kGroups, kCluster, kStageK, 3, kOutput, norm, FormatId::kBf16>;
  const int width = sizes.parts * sizes.rank, weight_rows = sizes.n * S::halves;
  auto x = hide<Bf16>(long(sizes.rows) * sizes.k), found = hide<Bf16>(long(sizes.rows) * width);
  auto square_sums = hide<float>(long(sizes.num_square_sums) * kTokens);
  unsigned word = kTurn - 1;
  const auto show_x = [&] {
    std::copy_n(t.x, x.size(), x.data());
    if (norm) std::copy_n(t.square_sums, square_sums.size(), square_sums.data());
    if (!norm) std::copy_n(t.residual, long(sizes.rows) * sizes.n, t.out);
  };

  begun = std::make_unique<Sight>(), ended = std::make_unique<Sight>();
  ended->show = show_x;
  ShrinkArgs shrinks{};
  shrinks.x = x.data(), shrinks.down = t.down, shrinks.down_stride = long(width) * sizes.k;
  shrinks.places = t.places, shrinks.distinct = t.distinct, shrinks.found = t.found, shrinks.begun = &word;
  shrinks.turn = kTurn, shrinks.k = sizes.k, shrinks.width = width, shrinks.rows = sizes.rows;
  run_shrink<(kTokens + 15) / 16 * 16>(shrinks, sizes.ways);
  if (word != kTurn) std::abort();

  x = hide<Bf16>(x.size()), square_sums = hide<float>(square_sums.size());
  if (!norm) std::memset(static_cast<void*>(t.out), 0xff, sizes.rows * sizes.n * sizeof(Bf16));
  begun = std::make_unique<Sight>(), ended = std::make_unique<Sight>();
  begun->show = show_x;
  ended->show = [&] { std::copy_n(t.found, found.size(), found.data()); };
  UpdatedGemmArgs args{};
  args.gemm.weight = Boxes{reinterpret_cast<const char*>(t.weight), {sizes.k}, {S::outputs}, weight_rows};
  args.gemm.x = Boxes{reinterpret_cast<const char*>(x.data()), {sizes.k}, {kTokens}, sizes.rows};
  args.gemm.stages = sizes.k / kStageK;
  OutputArgs& output = args.gemm.output;
  output.bias = t.bias, output.out = t.out, output.next_norm = t.next_norm, output.next_x = t.next_x;
  output.square_sums = square_sums.data(), output.next_square_sums = t.next_square_sums;
  output.eps = 1e-5f, output.per_k = 1.0f / sizes.k, output.n = sizes.n, output.rows = sizes.rows;
  output.num_square_sums = norm ? sizes.num_square_sums : 0;
  UpdateArgs& update = args.update;
  update.up = t.up, update.parts = t.part_of_tile, update.places = t.places, update.distinct = t.distinct;
  update.found = found.data(), update.begun = &word, update.up_stride = long(weight_rows) * sizes.rank;
  update.turn = kTurn, update.rank = sizes.rank, update.width = width, update.tile = sizes.tile;
  for (int tile = 0; tile * S::outputs < sizes.n; tile++) {
    phases.clear();
    run_cluster(kCluster, 128 * kGroups + 64, sizeof(GemmShared<S>), [&] {
      blockIdx = {unsigned(tile * kCluster) + block_rank, 0};
      gemm_updated<kTokens, kGroups, kCluster, kStageK, 3, kOutput, norm, FormatId::kBf16>(args);
    });
  }
}

extern "C" void multiply(const Tensors* tensors, const Sizes* sizes) {
  if (sizes->output == 0) return run<16, 1, 1, 128, Output::kStore>(*tensors, *sizes);
  if (sizes->output == 1) return run<32, 1, 2, 64, Output::kAdd>(*tensors, *sizes);
  if (sizes->output == 2) return run<24, 2, 2, 64, Output::kGate>(*tensors, *sizes);
  std::abort();
}
