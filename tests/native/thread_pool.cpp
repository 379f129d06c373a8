// SPDX-License-Identifier: Apache-2.0
// The thread pool: every index of every piece of work is done once, and is there when share() returns. Two callers at a
// time, pauses between pieces in which helpers fall asleep.
#include "cpu/thread_pool.h"

#include <cstdio>
#include <cstdlib>

using namespace blink;

namespace {

uint64_t failures_of(ThreadPool& pool, uint32_t seed, uint32_t pieces) {
  std::vector<uint32_t> done(257);
  uint64_t failures = 0;
  for (uint32_t piece = 1; piece <= pieces; ++piece) {
    seed = seed * 1664525 + 1013904223;
    const uint32_t count = (seed >> 8) % 257;
    pool.share(count, [&](uint64_t i) { done[i] += piece; });  // no atomics: the sanitizer sees a second visit
    for (uint32_t i = 0; i < done.size(); ++i) {
      failures += done[i] != (i < count ? piece : 0);
      done[i] = 0;
    }
    if (piece % 256 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return failures;
}

}  // namespace

int main(int, char** argv) {
  const uint32_t helpers = uint32_t(std::atoi(argv[1])), pieces = uint32_t(std::atoi(argv[2]));
  ThreadPool pool(helpers);
  uint64_t others = 0;
  std::thread caller([&] { others = failures_of(pool, 2, pieces); });
  const uint64_t own = failures_of(pool, 1, pieces);
  caller.join();
  std::atomic<uint32_t> helped{0};
  const auto self = std::this_thread::get_id();
  while (helpers != 0 && helped == 0)
    pool.share(64, [&](uint64_t) {
      helped += std::this_thread::get_id() != self;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    });
  std::printf("failures %llu pieces %u\n", static_cast<unsigned long long>(own + others), 2 * pieces);
}
