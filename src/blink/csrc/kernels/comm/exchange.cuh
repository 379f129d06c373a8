// SPDX-License-Identifier: Apache-2.0
// How the ranks of a tensor-parallel group exchange numbers: each stores lines into the others' memory. A line of 16
// bytes is two words of data, each followed by the number of the exchange. A line is stored and loaded at once, so
// that data is there when its numbers are (NCCL calls this LL).
//
// Lines are double-buffered by the parity of the number. A rank that sends in exchange e + 2 has received what all
// others sent in e + 1, and those sent that after they had read all of e.
#pragma once

#include "kernels/args.h"
#include "kernels/common/ptx.cuh"

namespace blink {

constexpr int kBoxHead = 256;  // bytes of a box before its lines: RankWords
constexpr unsigned long long kRankTimeoutNs = 2000000000;
constexpr unsigned kPollsPerLook = 1024;  // at the clock, and at what others say

struct RankWords {
  unsigned epoch;  // number of the last exchange of the steps that have ended; writer: end_step
  unsigned lost;   // a rank that did not come, plus one; 0: none. The first to miss it tells all
};

__device__ inline unsigned long long read_clock() {
  unsigned long long ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

__device__ inline uint4 load_line(const uint4* from) {
  uint4 line;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(line.x), "=r"(line.y), "=r"(line.z), "=r"(line.w)
               : "l"(from)
               : "memory");
  return line;
}

__device__ inline void store_line(uint4* to, uint2 data, unsigned number) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(data.x), "r"(number), "r"(data.y),
               "r"(number)
               : "memory");
}

// One exchange, as a thread takes part in it.
class Exchange {
 public:
  // What exchanges before have written must be there: after wait_for_prerequisites().
  __device__ explicit Exchange(const RankArgs& args) : args_(args) {
    const volatile RankWords& own = *words(args.rank);
    number_ = own.epoch + args.op + 1;
    is_lost_ = own.lost != 0;
  }

  __device__ int rank() const { return args_.rank; }
  __device__ int size() const { return args_.size; }

  __device__ void send(int to, int line, uint2 data) const { store_line(lines(to, args_.rank) + line, data, number_); }

  __device__ void send_to_all(int line, uint2 data) const {
    for (int to = 0; to < args_.size; to++)
      if (to != args_.rank) send(to, line, data);
  }

  // Wait for a line of another rank. Once one does not come, nothing is waited for, and what is returned is arbitrary.
  __device__ uint2 receive(int from, int line) {
    const uint4* at = lines(args_.rank, from) + line;
    uint4 found = load_line(at);
    for (unsigned polls = 1; (found.y != number_ || found.w != number_) && !is_lost_; polls++) {
      if (polls % kPollsPerLook == 0) look(from);
      found = load_line(at);
    }
    return make_uint2(found.x, found.z);
  }

 private:
  __device__ volatile RankWords* words(int rank) const {
    return reinterpret_cast<volatile RankWords*>(args_.boxes[rank]);
  }

  // What a rank sends to another in exchanges of this parity.
  __device__ uint4* lines(int to, int from) const {
    const long slot = long(number_ % 2) * args_.size + from;
    return reinterpret_cast<uint4*>(args_.boxes[to] + kBoxHead) + slot * args_.lines;
  }

  __device__ void look(int awaited) {
    is_lost_ = words(args_.rank)->lost != 0;
    const unsigned long long now = read_clock();
    if (begin_ == 0) begin_ = now;
    if (is_lost_ || now - begin_ < kRankTimeoutNs) return;
    is_lost_ = true;
    for (int rank = 0; rank < args_.size; rank++) words(rank)->lost = awaited + 1;
    __threadfence_system();
  }

  const RankArgs& args_;
  unsigned number_ = 0;
  bool is_lost_ = false;
  unsigned long long begin_ = 0;
};

}  // namespace blink
