// SPDX-License-Identifier: Apache-2.0
// What adapters (LoRA) make of a GEMM's input: x A^T, of each row with A of its own adapter; gemm_updated.cuh adds B
// times that. Its GEMM runs meanwhile. The blocks of a cluster share k, for 16 rows of A. They add up in one order, and
// MMAs have the tokens of one adapter side by side.
#pragma once

#include "kernels/args.h"
#include "kernels/common/ptx.cuh"

namespace blink {

constexpr int kShrinkRows = 16;  // of A, of a cluster
constexpr int kShrinkK = 32;     // that a lane's 16 bytes make of a row, with its neighbours'
constexpr int kShrinkHeld = 4;   // of such units, loaded before the wait

template <int kTokens, int kCluster, int kWarps>
struct ShrinkShared {
  static constexpr int octets = kTokens / 8;
  static_assert(octets <= kCluster);  // each octet of tokens has a block that ends it
  float4 of_warps[kWarps][octets][32];
  float4 of_blocks[kCluster][32];
  int members[kTokens];  // the tokens of an adapter
  int count;
};

// List the tokens of an adapter, in order. Runs on: a warp.
template <int kTokens>
__device__ inline void list_members(const ShrinkArgs& args, int adapter, int* members, int& count) {
  const unsigned lane = threadIdx.x % 32;
  int before = 0;
#pragma unroll
  for (int first = 0; first < kTokens; first += 32) {
    const int token = first + int(lane);
    const bool is_own = token < kTokens && token < args.rows && args.places[token] == adapter;
    const unsigned own = __ballot_sync(~0u, is_own);
    if (is_own) members[before + __popc(own & ((1u << lane) - 1))] = token;
    before += __popc(own);
  }
  if (lane == 0) count = before;
}

// A lane's values of two rows of A over a unit of k, eight rows apart.
struct DownRows {
  Vec16 first, second;
};

// The part of k that a warp has, in units, and the rows of A.
struct ShrinkPlace {
  int first_unit, end, column;

  __device__ DownRows load_rows(const ShrinkArgs& args, int adapter, int unit) const {
    const int lane = threadIdx.x % 32;
    if (adapter == 0 || unit >= end) return {};
    const Bf16* from = args.down + (adapter - 1) * args.down_stride + long(column + lane / 4) * args.k;
    from += unit * kShrinkK + lane % 4 * 8;
    return {*reinterpret_cast<const Vec16*>(from), *reinterpret_cast<const Vec16*>(from + 8l * args.k)};
  }
};

// Multiply some units by eight tokens of the adapter, of which this lane has one, or none (-1).
__device__ inline void multiply_units(const ShrinkArgs& args, const ShrinkPlace& at, int unit, int token,
                                      const DownRows (&rows)[kShrinkHeld], float (&sums)[4]) {
  Vec16 values[kShrinkHeld];
#pragma unroll
  for (int i = 0; i < kShrinkHeld; i++) {
    const bool is_there = token >= 0 && unit + i < at.end;
    const Bf16* from = args.x + long(token) * args.k + (unit + i) * kShrinkK + threadIdx.x % 4 * 8;
    values[i] = is_there ? load(from) : Vec16{};
  }
#pragma unroll
  for (int i = 0; i < kShrinkHeld; i++) {
    const DownRows& a = rows[i];
    multiply_add(sums, a.first.x, a.second.x, a.first.y, a.second.y, values[i].x, values[i].y);
    multiply_add(sums, a.first.z, a.second.z, a.first.w, a.second.w, values[i].z, values[i].w);
  }
}

__device__ inline float4 add_parts(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// Write the sums of eight tokens. Runs on: a warp, of the block that ends them.
template <class Shared>
__device__ inline void write_found(const ShrinkArgs& args, int column, int octet, int blocks, const Shared& shared) {
  const int lane = threadIdx.x % 32, at = octet * 8 + lane % 4 * 2;
  float4 total = shared.of_blocks[0][lane];
  for (int block = 1; block < blocks; block++) total = add_parts(total, shared.of_blocks[block][lane]);
  const float sums[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (at + i % 2 >= shared.count) continue;
    Bf16* to = args.found + long(shared.members[at + i % 2]) * args.width + column + lane / 4 + i / 2 * 8;
    *to = to_bf16(sums[i]);
  }
}

template <int kTokens, int kCluster, int kWarps>
__global__ void __launch_bounds__(32 * kWarps) shrink(const __grid_constant__ ShrinkArgs args) {
  using Shared = ShrinkShared<kTokens, kCluster, kWarps>;
  __shared__ Shared shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = int(cluster_rank());
  const int units = args.k / kShrinkK, share = rank * kWarps + warp, shares = kCluster * kWarps;
  const ShrinkPlace at = {units * share / shares, units * (share + 1) / shares,
                          int(blockIdx.x) / kCluster * kShrinkRows};
  launch_dependents();
  int nth = blockIdx.y, adapter = args.distinct[nth];
  DownRows rows[kShrinkHeld];
#pragma unroll
  for (int i = 0; i < kShrinkHeld; i++) rows[i] = at.load_rows(args, adapter, at.first_unit + i);
  wait_for_prerequisites();
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) store_release(args.begun, args.turn);
  while (adapter > 0) {
    cluster_arrive();  // the block has begun, and read what it was sent of the adapter before
    if (warp == 0) list_members<kTokens>(args, adapter, shared.members, shared.count);
    __syncthreads();
    const int count = shared.count;
    float sums[Shared::octets][4] = {};
    for (int unit = at.first_unit; unit < at.end; unit += kShrinkHeld) {
#pragma unroll
      for (int octet = 0; octet < Shared::octets; octet++) {
        const int member = octet * 8 + lane / 4;
        if (octet * 8 < count)
          multiply_units(args, at, unit, member < count ? shared.members[member] : -1, rows, sums[octet]);
      }
#pragma unroll
      for (int i = 0; i < kShrinkHeld; i++) rows[i] = at.load_rows(args, adapter, unit + kShrinkHeld + i);
    }
#pragma unroll
    for (int octet = 0; octet < Shared::octets; octet++)
      if (octet * 8 < count)
        shared.of_warps[warp][octet][lane] = {sums[octet][0], sums[octet][1], sums[octet][2], sums[octet][3]};
    nth += gridDim.y;
    adapter = nth < kTokens ? args.distinct[nth] : 0;
#pragma unroll
    for (int i = 0; i < kShrinkHeld; i++) rows[i] = at.load_rows(args, adapter, at.first_unit + i);
    __syncthreads();
    cluster_wait();
    for (int octet = warp; octet * 8 < count; octet += kWarps) {
      float4 total = shared.of_warps[0][octet][lane];
#pragma unroll
      for (int i = 1; i < kWarps; i++) total = add_parts(total, shared.of_warps[i][octet][lane]);
      store_in_cluster(address_in(octet, &shared.of_blocks[rank][lane]), total);
    }
    cluster_arrive();
    cluster_wait();
    if (warp == 0 && rank * 8 < count) write_found(args, at.column, rank, kCluster, shared);
    __syncthreads();  // the members are read
  }
}

}  // namespace blink
