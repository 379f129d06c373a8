// SPDX-License-Identifier: Apache-2.0
// The instructions that CUDA C++ has no words for. Those that came with Hopper are nothing on older architectures: what
// uses them compiles there and must not run.
#pragma once

#include "kernels/common/numbers.cuh"

namespace blink {

// Of a product: out = product + bias; out += product + bias; silu(gate) * up.
enum class Output { kStore, kAdd, kGate };

// A PDL edge lets the next kernel of the stream start while this one runs ...
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ... and makes it wait here until all kernels before it have ended and their writes can be seen. Nothing that another
// kernel of the step writes may be read before, and nothing written.
__device__ inline void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Load what an earlier kernel of the step has written.
__device__ inline Vec16 load(const void* from) {
  Vec16 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ inline unsigned load_word(const void* from) {
  unsigned word;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}

// Store a word behind all that this thread sees, and load one with all that its writer saw, on the same GPU.
__device__ inline void store_release(unsigned* to, unsigned word) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

__device__ inline unsigned load_acquire(const unsigned* from) {
  unsigned word;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}

// Let copies that this thread starts from here on see what it sees.
__device__ inline void let_copies_see() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// Load what another SM may have written lately.
__device__ inline unsigned load_pair_from_l2(const Bf16* from) {
  unsigned pair;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(pair) : "l"(from) : "memory");
  return pair;
}

__device__ inline float load_from_l2(const float* from) {
  float value;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
  return value;
}

__device__ inline float4 load_from_l2(const float4* from) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ inline Bf16 load_from_l2(const Bf16* from) {
  Bf16 value;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(value.bits) : "l"(from) : "memory");
  return value;
}

// A barrier in shared memory that counts arrivals and copied bytes; its phases alternate between parity 0 and 1.
using Barrier = unsigned long long;

__device__ inline unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

__device__ inline void initialize(Barrier& barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// Let copies and products see what this thread has stored to shared memory.
__device__ inline void publish_stores() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Copies that this thread starts from here on find the barriers initialised.
__device__ inline void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  publish_stores();
}

__device__ inline void arrive(Barrier& barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(&barrier))
               : "memory");
}

// Arrive at another block's barrier. Without release: with it an arrival waits for all that the warp has under way.
__device__ inline void arrive_in_cluster(unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

// Wait until the phase of this parity is over.
__device__ inline void wait(Barrier& barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      " @!done bra again;\n}" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
#endif
}

// Let the phase wait for so many bytes of copies, too; someone is yet to arrive.
__device__ inline void announce(Barrier& barrier, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
#endif
}

// Arrive and expect so many bytes of copies, which the phase then waits for as well.
__device__ inline void expect(Barrier& barrier, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(shared_address(&barrier)),
      "r"(bytes)
      : "memory");
#endif
}

// Copy consecutive memory to shared memory, counted by the barrier. Addresses and size are multiples of 16 bytes. A
// copy takes an SM about 60 ns, however small it is.
__device__ inline void copy(void* to, const void* from, unsigned bytes, Barrier& barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
#endif
}

// The same of what nobody reads again: L2 shall forget it first.
__device__ inline void copy_once(void* to, const void* from, unsigned bytes, Barrier& barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n .reg .b64 policy;\n"
      " createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      " cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
      "policy;\n"
      "}" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
#endif
}

// Copy what an earlier kernel of the step does not write to shared memory, which this thread can read behind
// wait_for_copies(). kBytes: 16, 8 or 4.
template <int kBytes>
__device__ inline void start_copy(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(kBytes)
               : "memory");
}

__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// As __syncthreads(), of the block's first warps alone.
template <int kWarps>
__device__ inline void sync_warps() {
  asm volatile("bar.sync 1, %0;" ::"n"(32 * kWarps) : "memory");
}

__device__ inline void prefetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Load four matrices of 8 x 8 bf16 and transpose each; lane l has the address of row l % 8 of matrix l / 8. A lane gets
// of each matrix rows l % 4 * 2 and the next, of column l / 4.
__device__ inline Vec16 load_transposed(const void* row) {
  Vec16 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared_address(row))
               : "memory");
  return v;
}

// Store two matrices of 8 x 8 bf16 transposed, which lanes hold as sums of products: row l / 4 and columns l % 4 * 2
// and the next. Lane l has the address for column l % 8 of matrix l / 8.
__device__ inline void store_transposed(void* column, unsigned first, unsigned second) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(column)),
               "r"(first), "r"(second)
               : "memory");
#endif
}

// The block's place in its cluster, and the cluster's barrier. Without clusters every block is alone.
__device__ inline unsigned cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

__device__ inline void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// The same of a thread that has nothing to show: what it has read and written before may come later.
__device__ inline void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The address of another block's copy of a shared variable.
__device__ inline unsigned address_in(unsigned rank, const void* own) {
  unsigned address = unsigned(__cvta_generic_to_shared(own));
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
  return address;
}

__device__ inline void store_in_cluster(unsigned address, float value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
#else
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
#endif
}

__device__ inline void store_in_cluster(unsigned address, unsigned value) {
  store_in_cluster(address, __uint_as_float(value));
}

__device__ inline void store_in_cluster(unsigned address, float4 values) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(values.x), "f"(values.y),
               "f"(values.z), "f"(values.w)
               : "memory");
#endif
}

// Add to a word of another block's shared memory, and return what it was.
__device__ inline unsigned add_in_cluster(unsigned address, unsigned value) {
  unsigned before;
#if __CUDA_ARCH__ >= 900
  asm volatile("atom.relaxed.cluster.shared::cluster.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(address), "r"(value)
               : "memory");
#else
  asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(address), "r"(value) : "memory");
#endif
  return before;
}

// Lower such a word.
__device__ inline void lower_in_cluster(unsigned address, unsigned value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.cluster.shared::cluster.min.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
#else
  asm volatile("red.shared.min.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
#endif
}

// Store to a block's shared memory, whose barrier counts the bytes. Who waits for that sees them, and no fence has to
// wait for all that the thread has under way, as a cluster's barrier would.
__device__ inline void store_counted(unsigned address, unsigned barrier, float value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address),
               "f"(value), "r"(barrier)
               : "memory");
#endif
}

__device__ inline void store_counted(unsigned address, unsigned barrier, float4 values) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w), "r"(barrier)
      : "memory");
#endif
}

// Send a value to the same place of a block of the cluster, whose barrier counts it; without a cluster, put it there.
template <int kCluster, class T>
__device__ inline void send(int to, T value, T& place, Barrier& counter) {
  if constexpr (kCluster > 1)
    store_counted(address_in(to, &place), address_in(to, &counter), value);
  else
    place = value;
}

// Wait for all that was sent here; without a cluster, for what the block's threads have put there.
template <int kCluster>
__device__ inline void receive(Barrier& counter) {
  if constexpr (kCluster > 1)
    wait(counter, 0);
  else
    __syncthreads();
}

}  // namespace blink
