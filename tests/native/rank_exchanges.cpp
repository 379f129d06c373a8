// SPDX-License-Identifier: Apache-2.0
// The exchanges of ranks of GPUs, each rank on threads of its own: sums in one shot and in two, sums of few rows with
// residual and norm, and joined columns, of all sizes, one after the other with nothing to keep ranks in step but the
// exchanges. Each begins before the kernel in front of it, which writes its input, has ended.
// Arguments: ranks, blocks, steps, seed, the rank that stops after the first step (-1: none).
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "gpu_ranks.h"
#include "kernels/comm/all_reduce.cu"
#include "kernels/comm/all_reduce_spread.cu"
#include "kernels/comm/two_shot.cu"

using namespace blink;

namespace {

enum class Kind { kOne, kTwo, kJoin, kSpread };

struct Work {
  Kind kind;
  int count;  // numbers of a sum or of a spread row, or rows to join
};

constexpr int kMostNumbers = 2500, kColumns = 7, kCluster = 2;
constexpr float kEps = 1e-3f;
using Shared = SpreadShared<kCluster>;

int size, blocks, steps, absent;
std::vector<Work> plan;
std::vector<std::unique_ptr<uint4[]>> boxes;
std::vector<uint64_t> places;
std::vector<int> starts;
std::atomic<unsigned> wrong = 0, compared = 0;
std::vector<std::atomic<uint64_t>> norms;  // of each exchange's numbers, in bits: those of the rank that told first

float residual_of(int at) { return float(at % 13 - 6); }
float norm_of(int column) { return float(column % 5 - 2) / 2; }

// Whose sums depend on their order.
float summand(int rank, int step, int op, int at) { return float((at * (rank + 3) + 31 * op + 7 * step) % 1000) / 7; }

RankArgs describe(int rank, int op, int lines, int pieces) {
  RankArgs args{};
  args.boxes = places.data(), args.lines = lines, args.pieces = pieces, args.rank = rank, args.size = size,
  args.op = op;
  return args;
}

struct Sizes {
  int lines = kMostNumbers, pieces = kMostNumbers;
  size_t bytes() const {
    return kBoxLines + 2l * size * lines * sizeof(uint4) + 2l * kPhases * size * pieces * sizeof(uint2);
  }
};
Sizes sizes;

// One rank: its memory, and the barriers of its blocks and between kernels.
struct Rank {
  explicit Rank(int number)
      : number(number),
        kernels(blocks * kThreads),
        lanes(blocks * kThreads),
        shared(blocks),
        part(kMostNumbers),
        out(kMostNumbers),
        residual(kMostNumbers),
        norm(kMostNumbers) {
    for (int i = 0; i < blocks; i++) barriers.push_back(std::make_unique<std::barrier<>>(kThreads));
    for (int i = 0; i < blocks; i++) {
      if (i % kCluster == 0) clusters.push_back(std::make_unique<Cluster>(kCluster * kThreads));
      clusters.back()->memory.push_back(reinterpret_cast<char*>(&shared[i]));
    }
    for (int i = 0; i < kMostNumbers; i++) norm[i] = norm_of(i);
  }

  // A cluster has a row.
  template <int kRanks>
  void spread(const AllReduceArgs& args) {
    Shared& own = shared[blockIdx.x];
    const int lines = (args.width / Pack<float>::kCount + kCluster * kThreads - 1) / (kCluster * kThreads);
    if (lines == 1) reduce_row<float, float, kRanks, kCluster, 1>(args, own);
    if (lines == 2) reduce_row<float, float, kRanks, kCluster, 2>(args, own);
    if (lines == 3) reduce_row<float, float, kRanks, kCluster, 3>(args, own);
  }

  void spread(const RankArgs& ranks, int width) {
    AllReduceArgs args{};
    args.ranks = ranks, args.partial = part.data(), args.out = out.data(), args.residual = residual.data();
    args.norm = norm.data(), args.count = count_rows() * width, args.width = width, args.eps = kEps;
    if (int(blockIdx.x) / kCluster >= count_rows()) return wait_for_prerequisites();
    if (size == 2) spread<2>(args);
    if (size == 3) spread<3>(args);
    if (size == 4) spread<4>(args);
    if (size == 8) spread<8>(args);
  }

  static int count_rows() { return blocks / kCluster; }

  // The kernel in front of an exchange.
  void write_input(const Work& work, int step, int op, int thread) {
    int mine = work.count;
    if (work.kind == Kind::kJoin) mine *= starts[number + 1] - starts[number];
    if (work.kind == Kind::kSpread) mine *= count_rows();
    for (int i = thread; i < mine; i += blocks * kThreads) {
      part[i] = summand(number, step, op, i);
      residual[i] = residual_of(i);
    }
    if (thread == 0) std::fill(out.begin(), out.end(), -1.0f);
    kernels.arrive_and_wait();
  }

  void compute(const Work& work, int step, int op, int thread) {
    const RankArgs ranks = describe(number, op, sizes.lines, sizes.pieces);
    prerequisites = [&] { write_input(work, step, op, thread); };
    if (work.kind == Kind::kJoin) {
      JoinArgs args{};
      args.ranks = ranks, args.part = part.data(), args.out = out.data(), args.starts = starts.data();
      args.rows = work.count;
      join<float>(args);
    } else if (work.kind == Kind::kTwo) {
      TwoShotArgs args{};
      args.ranks = ranks, args.partial = part.data(), args.out = out.data(), args.count = work.count;
      two_shot<float>(args);
    } else if (work.kind == Kind::kSpread) {
      spread(ranks, work.count);
    } else {
      AllReduceArgs args{};
      args.ranks = ranks, args.partial = part.data(), args.out = out.data(), args.count = work.count, args.width = 96;
      all_reduce<float, void>(args);
    }
    prerequisites = nullptr;
    kernels.arrive_and_wait();
    if (absent < 0 && work.kind == Kind::kSpread) check_norm(work.count, step, op, thread);
    if (absent < 0 && work.kind != Kind::kSpread) check(work, step, op, thread);
    kernels.arrive_and_wait();
  }

  // The sum in the residual, exactly; the norm but for rounding, and in the same bits on all ranks.
  void check_norm(int width, int step, int op, int thread) {
    for (int i = thread; i < count_rows() * width; i += blocks * kThreads) {
      const auto total = [&](int at) {
        float sum = 0;
        for (int rank = 0; rank < size; rank++) sum += summand(rank, step, op, at);
        return sum + residual_of(at);
      };
      double squares = 0;
      for (int column = 0; column < width; column++) squares += std::pow(double(total(i / width * width + column)), 2);
      const double expected = total(i) / std::sqrt(squares / width + kEps) * norm_of(i % width);
      const bool is_near = std::abs(out[i] - expected) <= 1e-5 * std::abs(expected) + 1e-7;
      uint64_t first = 0;
      const uint64_t bits = uint64_t(1) << 32 | std::bit_cast<uint32_t>(out[i]);
      const bool is_first = norms[(step * plan.size() + op) * kMostNumbers + i].compare_exchange_strong(first, bits);
      wrong += !is_near || residual[i] != total(i) || (!is_first && first != bits);
      compared++;
    }
  }

  void check(const Work& work, int step, int op, int thread) {
    if (work.kind == Kind::kJoin && number > 0) return;
    const int all = work.kind == Kind::kJoin ? work.count * starts[size] : work.count;
    for (int i = thread; i < all; i += blocks * kThreads) {
      float expected = 0;
      for (int rank = 0; rank < size; rank++) {
        if (work.kind != Kind::kJoin) {
          expected += summand(rank, step, op, i);
        } else if (const int column = i % starts[size]; starts[rank] <= column && column < starts[rank + 1]) {
          expected =
              summand(rank, step, op, i / starts[size] * (starts[rank + 1] - starts[rank]) + column - starts[rank]);
        }
      }
      wrong += out[i] != expected;
      compared++;
    }
  }

  void run(int thread) {
    blockIdx = {unsigned(thread / kThreads)}, threadIdx = {unsigned(thread % kThreads)}, gridDim = {unsigned(blocks)};
    block_barrier = barriers[blockIdx.x].get(), block_lanes = &lanes[blockIdx.x * kThreads];
    cluster = clusters[blockIdx.x / kCluster].get(), block_rank = blockIdx.x % kCluster;
    for (int step = 0; step < steps && (number != absent || step == 0); step++) {
      for (int op = 0; op < int(plan.size()); op++) {
        if ((step * 7 + op * 3 + number) % 11 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
        compute(plan[op], step, op, thread);
      }
      if (thread == 0) {
        EndStepArgs args{};
        args.ranks = describe(number, int(plan.size()), sizes.lines, sizes.pieces), args.failed = &failed;
        end_step<1>(args);
      }
      kernels.arrive_and_wait();
    }
  }

  int number;
  std::barrier<> kernels;
  std::vector<std::unique_ptr<std::barrier<>>> barriers;
  std::vector<float> lanes;
  std::vector<Shared> shared;
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<float> part, out, residual, norm;
  uint32_t failed = 0;
};

void prepare(unsigned seed) {
  std::mt19937 random(seed);
  for (int rank = 0; rank <= size; rank++) starts.push_back(rank * kColumns - (rank == size ? 2 : 0));
  for (const int count : {1, 2, 63, 64, 65, 96, 97, 1000, 2100})
    for (const Kind kind : {Kind::kOne, Kind::kTwo}) plan.push_back({kind, count});
  for (const int width : {2, 126, 128, 200, 384}) plan.push_back({Kind::kSpread, width});
  for (const int rows : {1, 5, 40}) plan.push_back({Kind::kJoin, rows});
  norms = std::vector<std::atomic<uint64_t>>(steps * plan.size() * kMostNumbers);
  std::shuffle(plan.begin(), plan.end(), random);
  for (int rank = 0; rank < size; rank++) {
    boxes.push_back(std::make_unique<uint4[]>(sizes.bytes() / sizeof(uint4) + 1));
    places.push_back(reinterpret_cast<uint64_t>(boxes.back().get()));
  }
}

}  // namespace

int main(int, char** arguments) {
  size = std::atoi(arguments[1]), blocks = std::atoi(arguments[2]), steps = std::atoi(arguments[3]);
  absent = std::atoi(arguments[5]);
  if (absent >= 0) clock_slowness = 1;
  prepare(unsigned(std::atoi(arguments[4])));
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; rank++) ranks.push_back(std::make_unique<Rank>(rank));
  for (auto& rank : ranks)
    for (int thread = 0; thread < blocks * kThreads; thread++)
      threads.emplace_back([&rank = *rank, thread] { rank.run(thread); });
  for (std::thread& thread : threads) thread.join();
  unsigned lost = 0, told = 0;
  for (const auto& rank : ranks) {
    const auto& words = *reinterpret_cast<const RankWords*>(places[rank->number]);
    lost += words.lost == unsigned(absent + 1);
    told += rank->number != absent && rank->failed == kFirstLostRank + unsigned(absent);
  }
  std::printf("wrong %u compared %u lost %u told %u\n", wrong.load(), compared.load(), lost, told);
}
