// SPDX-License-Identifier: Apache-2.0
// The exchanges of ranks of GPUs, each rank on threads of its own: sums in one shot and in two, and joined columns, of
// all sizes, one after the other with nothing to keep ranks in step but the exchanges.
// Arguments: ranks, blocks, steps, seed, the rank that stops after the first step (-1: none).
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "gpu_ranks.h"
#include "kernels/comm/all_reduce.cu"
#include "kernels/comm/two_shot.cu"

using namespace blink;

namespace {

enum class Kind { kOne, kTwo, kJoin };

struct Work {
  Kind kind;
  int count;  // numbers of a sum, or rows to join
};

constexpr int kMostNumbers = 2500, kColumns = 7;

int size, blocks, steps, absent;
std::vector<Work> plan;
std::vector<std::unique_ptr<uint4[]>> boxes;
std::vector<uint64_t> places;
std::vector<int> starts;
std::atomic<unsigned> wrong = 0, compared = 0;

float summand(int rank, int step, int op, int at) { return float((at * (rank + 3) + 31 * op + 7 * step) % 1000); }

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
  explicit Rank(int number) : number(number), kernels(blocks * kThreads), part(kMostNumbers), out(kMostNumbers) {
    for (int i = 0; i < blocks; i++) barriers.push_back(std::make_unique<std::barrier<>>(kThreads));
  }

  void compute(const Work& work, int step, int op, int thread) {
    const RankArgs ranks = describe(number, op, sizes.lines, sizes.pieces);
    const int mine = work.kind == Kind::kJoin ? work.count * (starts[number + 1] - starts[number]) : work.count;
    for (int i = thread; i < mine; i += blocks * kThreads) part[i] = summand(number, step, op, i);
    if (thread == 0) std::fill(out.begin(), out.end(), -1.0f);
    kernels.arrive_and_wait();
    if (work.kind == Kind::kJoin) {
      JoinArgs args{};
      args.ranks = ranks, args.part = part.data(), args.out = out.data(), args.starts = starts.data();
      args.rows = work.count;
      join<float>(args);
    } else if (work.kind == Kind::kTwo) {
      TwoShotArgs args{};
      args.ranks = ranks, args.partial = part.data(), args.out = out.data(), args.count = work.count;
      two_shot<float>(args);
    } else {
      AllReduceArgs args{};
      args.ranks = ranks, args.partial = part.data(), args.out = out.data(), args.count = work.count, args.width = 96;
      all_reduce<float, void>(args);
    }
    kernels.arrive_and_wait();
    if (absent < 0) check(work, step, op, thread);
    kernels.arrive_and_wait();
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
    block_barrier = barriers[blockIdx.x].get();
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
  std::vector<float> part, out;
  uint32_t failed = 0;
};

void prepare(unsigned seed) {
  std::mt19937 random(seed);
  for (int rank = 0; rank <= size; rank++) starts.push_back(rank * kColumns - (rank == size ? 2 : 0));
  for (const int count : {1, 2, 63, 64, 65, 96, 97, 1000, 2100})
    for (const Kind kind : {Kind::kOne, Kind::kTwo}) plan.push_back({kind, count});
  for (const int rows : {1, 5, 40}) plan.push_back({Kind::kJoin, rows});
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
