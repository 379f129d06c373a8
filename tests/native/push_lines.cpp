// SPDX-License-Identifier: Apache-2.0
// The epilogue of GEMVs that push: which line of which box each result goes to, of several splits.
#include <cstdio>
#include <memory>
#include <vector>

#include "gpu_ranks.h"
#include "kernels/comm/push_gemv.cu"

namespace blink {
alignas(1024) char memory[1 << 16];  // of the block that runs
}

using namespace blink;

namespace {

constexpr int kN = 128, kMostRows = 2, kLines = kN * kMostRows / kLineLanes;

unsigned wrong = 0, compared = 0;

template <class Kernel>
void run_blocks(int blocks, int cluster_size, int threads, Kernel kernel) {
  std::vector<float> lanes(threads);
  for (int index = 0; index < blocks; index++) {
    std::barrier<> barrier(threads);
    std::vector<std::thread> all;
    for (int thread = 0; thread < threads; thread++)
      all.emplace_back([&, thread] {
        threadIdx = {unsigned(thread)}, blockIdx = {unsigned(index)}, gridDim = {unsigned(blocks)};
        block_barrier = &barrier, block_lanes = lanes.data(), block_rank = index % cluster_size;
        kernel();
      });
    for (std::thread& thread : all) thread.join();
  }
}

// Run a GEMV of a rank of several, and look for its numbers in all boxes.
template <int kRows, int kCluster, class Kernel>
void check(int size, int rank, bool has_bias, bool is_scaled, int tile, int warps, Kernel kernel) {
  const unsigned epoch = 40 + rank, op = 3, number = epoch + op + 1;
  std::vector<std::vector<uint4>> boxes(size, std::vector<uint4>(kBoxLines / sizeof(uint4) + 2 * size * kLines));
  std::vector<uint64_t> places;
  for (auto& box : boxes) places.push_back(reinterpret_cast<uint64_t>(box.data()));
  reinterpret_cast<RankWords*>(boxes[rank].data())->epoch = epoch;
  std::vector<Bf16> bias(kN);
  std::vector<float> scales(kN);
  for (int i = 0; i < kN; i++) bias[i] = to_bf16(float(i % 9)), scales[i] = float(i % 4 + 1);
  PushGemvArgs args{};
  args.gemv.n = kN, args.gemv.bias = has_bias ? bias.data() : nullptr, args.gemv.scales = scales.data();
  args.ranks.boxes = places.data(), args.ranks.lines = kLines, args.ranks.rank = rank, args.ranks.size = size;
  args.ranks.op = op, args.own_box = boxes[rank].data();
  run_blocks(kN / tile * kCluster, kCluster, 32 * (warps + 1), [&] { kernel(args); });
  for (const auto& box : boxes) {
    const uint4* lines = box.data() + kBoxLines / sizeof(uint4) + (number % 2 * size + rank) * kLines;
    for (int at = 0; at < kRows * kN; at++) {
      float expected = 0;
      for (int block = 0; block < kCluster; block++) expected += part_of(block, at / kN, at % kN);
      if (is_scaled) expected *= scales[at % kN];
      expected += has_bias ? to_float(bias[at % kN]) : 0;
      const uint4 line = lines[at / kLineLanes];
      const unsigned word = at % 4 < 2 ? line.x : line.z, bits = at % 2 ? word >> 16 : word & 0xffff;
      wrong += bits != to_bf16(expected).bits || line.y != number || line.w != number;
      compared++;
    }
  }
}

template <int kRows, int kWarps, int kCluster, int kTile>
void check_formats(int size, int rank) {
  check<kRows, kCluster>(size, rank, true, false, kTile, kWarps,
                         push_gemv<kRows, 1, kWarps, kCluster, 1, kTile, 1, 1, Output::kStore, false>);
  check<kRows, kCluster>(size, rank, false, true, kTile, kWarps,
                         push_gemv_quantized<false, kRows, 1, kWarps, kCluster, 1, kTile, 1, 1, Output::kStore, false>);
  check<kRows, kCluster>(size, rank, true, false, kTile, kWarps,
                         push_gemv_int4<kRows, 1, kWarps, kCluster, 1, kTile, 1, 1, Output::kStore, false>);
}

}  // namespace

int main() {
  check_formats<1, 1, 1, 16>(2, 0);
  check_formats<2, 2, 1, 32>(3, 2);
  check_formats<1, 2, 2, 32>(8, 5);
  check_formats<2, 1, 4, 64>(4, 1);
  check_formats<2, 1, 1, 64>(5, 4);
  std::printf("wrong %u compared %u\n", wrong, compared);
}
