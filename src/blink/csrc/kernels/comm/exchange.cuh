// SPDX-License-Identifier: Apache-2.0
// How the ranks of a tensor-parallel group exchange numbers: each stores lines into the others' memory. A line of 16
// bytes is two words of data, each followed by the number of the exchange. A line is stored and loaded at once, so
// that data is there when its numbers are (NCCL calls this LL).
//
// Large exchanges take plain stores of pieces, in two phases (two_shot.cu). After its pieces of a phase, a block of
// threads stores a flag: the number of the exchange. The same block of the other rank waits for it.
//
// Lines, pieces and flags are double-buffered by the parity of the number. A rank that sends in exchange e + 2 has
// received what all others sent in e + 1, and those sent that after they had read all of e.
#pragma once

#include "kernels/comm/words.cuh"
#include "kernels/comm_args.h"
#include "kernels/common/ptx.cuh"
#include "region/platform.h"

namespace blink {

constexpr int kMostRanks = 8, kMostBlocks = 64, kPhases = 2;
constexpr int kFlagsOfParity = kPhases * kMostRanks * kMostBlocks;
constexpr int kBoxHead = 256;  // bytes of a box before its flags: RankWords
constexpr int kBoxLines = kBoxHead + 2 * kFlagsOfParity * sizeof(uint32_t);  // bytes before its lines; then pieces
constexpr unsigned long long kRankTimeoutNs = 2000000000;
constexpr unsigned kPollsPerLook = 1024;  // at the clock, and at what others say

struct RankWords {
  unsigned epoch;  // number of the last exchange of the steps that have ended; writer: end_step
  unsigned lost;   // a rank that did not come, plus one; 0: none. The first to miss it tells all
};

// One exchange, as a thread takes part in it.
class Exchange {
 public:
  // May stand before wait_for_prerequisites(): the epoch changes with the last kernel of a step's graph alone, and a
  // graph starts once the one before has ended. A loss that is told meanwhile is seen while something is waited for.
  __device__ explicit Exchange(const RankArgs& args) : args_(args) {
    const volatile RankWords& own = *words(args.rank);
    number_ = own.epoch + args.op + 1;
    is_lost_ = own.lost != 0;
  }

  __device__ int rank() const { return args_.rank; }
  __device__ int size() const { return args_.size; }
  __device__ unsigned number() const { return number_; }

  // The i-th of the other ranks.
  __device__ int other(int i) const { return i + (i >= args_.rank); }

  // What a rank sends to another in exchanges of this parity.
  __device__ uint4* lines(int to, int from) const {
    const long slot = long(number_ % 2) * args_.size + from;
    return reinterpret_cast<uint4*>(args_.boxes[to] + kBoxLines) + slot * args_.lines;
  }

  __device__ void send(int to, int line, uint2 data) const { store_line(lines(to, args_.rank) + line, data, number_); }

  __device__ void send_to_all(int line, uint2 data) const {
    for (int to = 0; to < args_.size; to++)
      if (to != args_.rank) send(to, line, data);
  }

  // Wait for a line of another rank. Once one does not come, nothing is waited for, and what is returned is arbitrary.
  __device__ uint2 receive(int from, int line) {
    const uint4* at = lines(args_.rank, from) + line;
    uint4 found;
    await(from, [&] {
      found = load_line(at);
      return found.y == number_ && found.w == number_;
    });
    return make_uint2(found.x, found.z);
  }

  // Wait for some lines of each other rank, which are polled together: kCount from `first` on that lie `step` apart, as
  // far as there are so many. box: lines(rank(), 0).
  template <int kOthers, int kCount>
  __device__ void receive(const uint4* box, int first, int step, int count, uint2 (&data)[kCount][kOthers]) {
    uint4 found[kCount][kOthers];
    int missing = 0;
    await(missing, [&] {
      missing = -1;
#pragma unroll
      for (int i = 0; i < kCount; i++)
#pragma unroll
        for (int from = 0; from < kOthers; from++)
          if (first + i * step < count)
            found[i][from] = load_line(box + long(other(from)) * args_.lines + first + i * step);
#pragma unroll
      for (int i = 0; i < kCount; i++)
#pragma unroll
        for (int from = 0; from < kOthers; from++)
          if (first + i * step < count && (found[i][from].y != number_ || found[i][from].w != number_))
            missing = other(from);
      return missing < 0;
    });
#pragma unroll
    for (int i = 0; i < kCount; i++)
#pragma unroll
      for (int from = 0; from < kOthers; from++) data[i][from] = make_uint2(found[i][from].x, found[i][from].z);
  }

  // What a rank stores in another's box in a phase of a large exchange of this parity.
  __device__ uint2* pieces(int to, int phase, int from) const {
    uint4* after = reinterpret_cast<uint4*>(args_.boxes[to] + kBoxLines) + 2l * args_.size * args_.lines;
    const long slot = long(number_ % 2 * kPhases + phase) * args_.size + from;
    return reinterpret_cast<uint2*>(after) + slot * args_.pieces;
  }

  // Tell the same block of all ranks that this one's pieces of a phase are there, and wait for theirs. All threads.
  __device__ void meet(int phase) {
    __syncthreads();
    const int other = threadIdx.x;
    if (other < args_.size && other != args_.rank) {
      __threadfence_system();  // what all threads of this block have stored
      store_release(*flag(other, phase, args_.rank), number_);
      uint32_t& theirs = *flag(args_.rank, phase, other);
      await(other, [&] { return load_acquire(theirs) == number_; });
    }
    __syncthreads();
  }

 private:
  template <class IsThere>
  __device__ void await(const int& from, IsThere is_there) {
    for (unsigned polls = 1; !is_there() && !is_lost_; polls++)
      if (polls % kPollsPerLook == 0) look(from);
  }

  __device__ uint32_t* flag(int to, int phase, int from) const {
    const int place = (number_ % 2 * kPhases + phase) * kMostRanks + from;
    return reinterpret_cast<uint32_t*>(args_.boxes[to] + kBoxHead) + place * kMostBlocks + blockIdx.x;
  }

  __device__ volatile RankWords* words(int rank) const {
    return reinterpret_cast<volatile RankWords*>(args_.boxes[rank]);
  }

  __device__ void look(int awaited) {
    is_lost_ = words(args_.rank)->lost != 0;
    const unsigned long long now = read_clock();
    if (begin_ == 0) begin_ = now;
    if (is_lost_ || now - begin_ < kRankTimeoutNs) return;
    is_lost_ = true;
#pragma unroll 1
    for (int rank = 0; rank < args_.size; rank++) words(rank)->lost = awaited + 1;
    __threadfence_system();
  }

  const RankArgs& args_;
  unsigned number_ = 0;
  bool is_lost_ = false;
  unsigned long long begin_ = 0;
};

}  // namespace blink
