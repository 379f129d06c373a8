// SPDX-License-Identifier: Apache-2.0
// Ranks of GPUs whose kernels push their results, each kernel on threads of its own: the all-reduce behind a kernel
// starts before it, and what it writes lies where that one still reads. Each all-reduce's result is the next kernel's
// input. Arguments: ranks, width, exchanges, seed, the rank that stops after half of the exchanges (-1: none;
// -2: none, but kernels of the first rank take longer than another rank is waited for).
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "gpu_ranks.h"
#include "kernels/comm/all_reduce_spread.cu"
#include "kernels/comm/push.cuh"

using namespace blink;

namespace {

constexpr int kCluster = 2, kReducers = kCluster * kSpreadThreads, kSenders = kThreads;
constexpr float kEps = 1e-3f;

int size, width, exchanges, absent;
unsigned seed;
std::vector<std::unique_ptr<uint4[]>> boxes;
std::vector<uint64_t> places;
size_t box_lines;
std::atomic<unsigned> wrong = 0, compared = 0;
// Of each exchange's numbers, in bits: those of the rank that told first; 0: none has.
std::vector<std::atomic<uint32_t>> results, residuals;

bool has_norm(int op) { return op % 3 != 2; }
float norm_of(int column) { return float(column % 5 + 1) / 2; }
Bf16 first_input(int at) { return to_bf16(float(at % 7 - 3)); }
Bf16 first_residual(int at) { return to_bf16(float(at % 11 - 5)); }

// One number of a rank's part, which depends on two of the input.
float part_of(int rank, Bf16 one, Bf16 other) { return to_float(one) * float(rank + 1) / 3 + to_float(other) / 5; }
int other_input(int at) { return (at * 7 + 3) % width; }

RankArgs describe(int rank, int op) {
  RankArgs args{};
  args.boxes = places.data(), args.lines = width, args.rank = rank, args.size = size, args.op = op;
  return args;
}

void pause_at_random(std::mt19937& random) {
  if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
}

// Wait until so many threads have counted.
void await(const std::atomic<int>& counter, int count) {
  while (counter.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

bool tell(std::vector<std::atomic<uint32_t>>& all, int op, int at, Bf16 value) {
  uint32_t first = 0;
  const uint32_t bits = 1u << 16 | value.bits;
  return all[op * width + at].compare_exchange_strong(first, bits) || first == bits;
}

Bf16 told(const std::vector<std::atomic<uint32_t>>& all, int op, int at) {
  return {static_cast<unsigned short>(all[op * width + at].load())};
}

struct Rank {
  explicit Rank(int number)
      : number(number), block(kThreads), lanes(3 * kThreads), input(width), residual(width), norm(width) {
    for (int i = 0; i < kCluster; i++) blocks.push_back(std::make_unique<std::barrier<>>(kSpreadThreads));
    for (int i = 0; i < width; i++) input[i] = first_input(i), residual[i] = first_residual(i), norm[i] = norm_of(i);
    for (auto& memory : shared)
      for (auto& of_block : memory) clusters[&memory - shared].memory.push_back(reinterpret_cast<char*>(&of_block));
  }

  bool is_slow(int op) const { return absent == -2 && number == 0 && op == 0; }
  int count() const { return number == absent ? exchanges / 2 : exchanges; }

  // The kernels that push.
  void send(int thread) {
    std::mt19937 random(seed * 1000 + number * 100 + thread);
    begin(thread, 0, &block);
    for (int op = 0; op < count(); op++) {
      await(reduced, op * kReducers);
      if (is_slow(op)) std::this_thread::sleep_for(std::chrono::nanoseconds(kRankTimeoutNs + kRankTimeoutNs / 4));
      pause_at_random(random);
      const RankArgs ranks = describe(number, op);
      PushBoxes to;
      to.load(ranks, boxes[number].get());
      for (int start = 0; start < width; start += kSenders) {
        const int at = start + thread;
        const bool is_there = at < width;
        const float value = is_there ? part_of(number, input[at], input[other_input(at)]) : 0;
        push_line(ranks, to, at / kLineLanes, to_bf16(value).bits, is_there);
      }
      sent.fetch_add(1, std::memory_order_release);
    }
  }

  // The all-reduces. Which block has which part of the row changes.
  void reduce(int thread) {
    std::mt19937 random(seed * 1000 + number * 100 + kSenders + thread);
    for (int op = 0; op < count(); op++) {
      begin(thread % kSpreadThreads, thread / kSpreadThreads, blocks[thread / kSpreadThreads].get());
      pause_at_random(random);
      has_true_clock = is_slow(op);
      cluster = &clusters[op % 2], block_rank = (blockIdx.x + op / 2) % kCluster;
      prerequisites = [&] { await(sent, (op + 1) * kSenders); };
      AllReduceArgs args{};
      args.ranks = describe(number, op), args.norm = norm.data(), args.residual = residual.data();
      args.out = input.data(), args.count = args.width = width, args.eps = kEps;
      Shared& own = shared[op % 2][block_rank];
      const int lines = width / kLineLanes;
      dispatch(args, own, op, (lines + kReducers - 1) / kReducers);
      const int first = block_rank * kSpreadThreads + threadIdx.x;
      for (int line = first; line < lines && absent < 0; line += kReducers)
        for (int at = line * kLineLanes; at < (line + 1) * kLineLanes; at++) check_sum(op, at);
      reduced.fetch_add(1, std::memory_order_release);
    }
  }

  void begin(int thread, int of_rank, std::barrier<>* barrier) {
    const bool sends = barrier == &block;
    threadIdx = {unsigned(thread)}, blockIdx = {unsigned(of_rank)}, gridDim = {unsigned(sends ? 1 : kCluster)};
    block_barrier = barrier, block_lanes = &lanes[(sends ? 2 : of_rank) * kThreads];
    own_box_begin = boxes[number].get(), own_box_end = own_box_begin + box_lines;
  }

  using Shared = SpreadShared<kCluster>;

  template <class Norm, int kRanks>
  void reduce_lines(const AllReduceArgs& args, Shared& own, int lines) {
    if (lines == 1) reduce_row<Bf16, Norm, kRanks, kCluster, 1, true>(args, own);
    if (lines == 2) reduce_row<Bf16, Norm, kRanks, kCluster, 2, true>(args, own);
  }

  void dispatch(const AllReduceArgs& args, Shared& own, int op, int lines) {
    if (size == 2) has_norm(op) ? reduce_lines<float, 2>(args, own, lines) : reduce_lines<void, 2>(args, own, lines);
    if (size == 3) has_norm(op) ? reduce_lines<float, 3>(args, own, lines) : reduce_lines<void, 3>(args, own, lines);
    if (size == 5) has_norm(op) ? reduce_lines<float, 5>(args, own, lines) : reduce_lines<void, 5>(args, own, lines);
  }

  // What this thread has just written: the sum in the order of ranks, exactly, and the same norm on all ranks.
  void check_sum(int op, int at) {
    const auto before = [&](int i) { return op == 0 ? first_input(i) : told(results, op - 1, i); };
    const Bf16 old = op == 0 ? first_residual(at) : told(residuals, op - 1, at);
    float total = 0;
    for (int rank = 0; rank < size; rank++) {
      const Bf16 part = to_bf16(part_of(rank, before(at), before(other_input(at))));
      total = rank == 0 ? to_float(part) : to_float(to_bf16(total + to_float(part)));
    }
    const Bf16 sum = has_norm(op) ? to_bf16(total + to_float(old)) : to_bf16(total);
    const Bf16 found = has_norm(op) ? residual[at] : input[at];
    wrong += found.bits != sum.bits || (!has_norm(op) && residual[at].bits != old.bits);
    wrong += !tell(residuals, op, at, residual[at]) || !tell(results, op, at, input[at]);
    compared++;
  }

  int number;
  std::barrier<> block;
  std::vector<std::unique_ptr<std::barrier<>>> blocks;
  std::vector<float> lanes;
  Shared shared[2][kCluster];
  Cluster clusters[2] = {Cluster(kReducers), Cluster(kReducers)};
  std::vector<Bf16> input, residual;
  std::vector<float> norm;
  std::atomic<int> sent = 0, reduced = 0;  // threads that have ended a kernel, of all kernels
};

// The norms, from the residuals that were told.
void check_norms() {
  for (int op = 0; op < exchanges; op++) {
    if (!has_norm(op)) continue;
    double squares = 0;
    for (int at = 0; at < width; at++) squares += std::pow(double(to_float(told(residuals, op, at))), 2);
    for (int at = 0; at < width; at++) {
      const double expected = to_float(told(residuals, op, at)) / std::sqrt(squares / width + kEps) * norm_of(at);
      wrong += !(std::abs(to_float(told(results, op, at)) - expected) <= 0.004 * std::abs(expected));
      compared++;
    }
  }
}

}  // namespace

int main(int, char** arguments) {
  size = std::atoi(arguments[1]), width = std::atoi(arguments[2]), exchanges = std::atoi(arguments[3]);
  seed = unsigned(std::atoi(arguments[4])), absent = std::atoi(arguments[5]);
  if (absent >= 0) clock_slowness = 1;
  box_lines = kBoxLines / sizeof(uint4) + 2l * size * width;
  results = std::vector<std::atomic<uint32_t>>(exchanges * width);
  residuals = std::vector<std::atomic<uint32_t>>(exchanges * width);
  for (int rank = 0; rank < size; rank++) {
    boxes.push_back(std::make_unique<uint4[]>(box_lines));
    places.push_back(reinterpret_cast<uint64_t>(boxes.back().get()));
  }
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; rank++) ranks.push_back(std::make_unique<Rank>(rank));
  for (auto& rank : ranks) {
    for (int i = 0; i < kSenders; i++) threads.emplace_back([&rank = *rank, i] { rank.send(i); });
    for (int i = 0; i < kReducers; i++) threads.emplace_back([&rank = *rank, i] { rank.reduce(i); });
  }
  for (std::thread& thread : threads) thread.join();
  if (absent < 0) check_norms();
  unsigned lost = 0;
  for (const uint64_t place : places)
    lost += reinterpret_cast<const RankWords*>(place)->lost == unsigned(max(absent, -1) + 1);
  std::printf("wrong %u compared %u lost %u\n", wrong.load(), compared.load(), lost);
}
