// SPDX-License-Identifier: Apache-2.0
// The C API of the library, called from Python through ctypes. No function throws or keeps a pointer beyond its object.
#include <cstring>

#include "automaton/build.h"
#include "cpu/attention.h"
#include "cpu/constrain.h"
#include "cpu/gguf/bf16.h"
#include "cpu/gguf/int16.h"
#include "cpu/gguf/product.h"
#include "cpu/host_env.h"
#include "cpu/json_weight.h"
#include "cpu/kernels.h"
#include "cpu/layers.h"
#include "cpu/lease_renewer.h"
#include "cpu/sampler.h"
#include "cpu/shm_poller.h"
#include "rdma/collector.h"
#include "region/layout_table.h"
#include "scheduler/integrity.h"
#include "scheduler/state_arrays.h"
#include "scheduler/token_index.h"

using namespace blink;

extern "C" {

const char* blink_layout_text() { return layout_text().c_str(); }
uint64_t blink_layout_digest() { return layout_digest(); }

// Names, offsets, element sizes and counts of the state's arrays, as JSON; the text lives until the thread's next call.
const char* blink_state_text(const Geometry* geometry) {
  static thread_local std::string text;
  State state{};
  text = "{";
  place_arrays(state, *geometry, [&]<class T>(const char* name, T*&, uint64_t offset, uint64_t count) {
    text += std::string(text.size() > 1 ? "," : "") + "\"" + name + "\":[" + std::to_string(offset) + "," +
            std::to_string(sizeof(T)) + "," + std::to_string(count) + "]";
  });
  text += "}";
  return text.c_str();
}

uint64_t blink_region_bytes(const Geometry* g) { return region_layout(*g).bytes; }

// Fill a zeroed region's header. The region is usable once blink_region_publish() has stored its epoch.
void blink_region_init(void* region, const Geometry* g, const uint8_t* hash_key, const char* model) {
  Header& h = *static_cast<Header*>(region);
  const RegionLayout layout = region_layout(*g);
  h.magic = kMagic;
  h.digest = layout_digest();
  write_offsets(h, layout);
  std::memcpy(h.hash_key, hash_key, sizeof h.hash_key);
  std::strncpy(h.model, model, sizeof h.model - 1);
  h.geometry = *g;
}
void blink_region_publish(void* region, uint64_t epoch) { store_release(static_cast<Header*>(region)->epoch, epoch); }

void blink_kv_event_layout(const Geometry* g, KvEventLayout* out) {
  *out = kv_event_layout(g->num_kv_events, g->block_size);
}
void blink_queue_pair_layout(const Geometry* g, QueuePairLayout* out) { *out = queue_pair_layout(*g); }

uint64_t blink_state_bytes(const Geometry* g) {
  State state{};
  return lay_out_arrays(state, *g, 0);
}

// Write the State that belongs at address `state_base`, for a scheduler that sees the region at `region_base`.
void blink_state_build(State* out, const void* region, uint64_t state_base, uint64_t region_base) {
  const Geometry& geometry = static_cast<const Header*>(region)->geometry;
  *out = State{};
  out->geometry = geometry;
  lay_out_arrays(*out, geometry, state_base);
  bind_region(*out, geometry, region_base);
}

// Fill a zeroed table of a number of entries with the tokens of a vocabulary.
void blink_index_tokens(const uint32_t* starts, const uint8_t* text, uint32_t vocab_size, uint32_t entries,
                        TokenEntry* index) {
  index_tokens(starts, text, vocab_size, entries, index);
}

// One pass at a given time, for tests and benchmarks.
uint32_t blink_step(State* state, uint64_t now_ns) {
  SoloEnv env{now_ns};
  return uint32_t(step(env, *state));
}
// One pass as a trace has it, for tests: its decisions are those that were taken then.
uint32_t blink_step_replayed(State* state, uint64_t now_ns, uint64_t launched_ns) {
  ReplayEnv env{{now_ns}, launched_ns};
  return uint32_t(step(env, *state));
}
// What an idle scheduler on a GPU looks at, for tests.
uint32_t blink_has_news(const State* state, uint32_t qp) { return has_news(*state, qp); }
// First broken invariant of the state, or null.
const char* blink_check_integrity(const State* state) { return check_integrity(*state); }

Loop* blink_loop_start(State* state) { return new Loop(*state); }
int32_t blink_loop_wait(Loop* loop, uint32_t timeout_ms) { return loop->wait(timeout_ms); }
void blink_loop_finish(Loop* loop, uint32_t failed) { loop->finish(failed); }
void blink_loop_stop(Loop* loop) { delete loop; }

uint32_t blink_load_u32(const uint32_t* word) { return load_acquire(*word); }
uint64_t blink_load_u64(const uint64_t* word) { return load_acquire(*word); }
void blink_store_u32(uint32_t* word, uint32_t value) { store_release(*word, value); }
void blink_store_u64(uint64_t* word, uint64_t value) { store_release(*word, value); }

// Copy the completions that have arrived at `head` and behind it; returns how many.
// Orders: acquires each entry's tag before its payload is read.
uint32_t blink_cq_drain(const Cqe* queue, uint32_t entries, uint32_t head, Cqe* out, uint32_t max) {
  uint32_t n = 0;
  for (; n < max; n++, head++) {
    const Cqe& entry = queue[head & (entries - 1)];
    const uint32_t tag = load_acquire(entry.tag);
    if (tag_of(tag).phase != cq_phase(head, entries)) break;
    out[n] = entry;
    out[n].tag = tag;
  }
  return n;
}

// Return where the first of `count` completions from `from` on is that is more than a token or a part of a
// vector, as it ends a sequence or comes of admission; `count` if there is none.
uint32_t blink_cq_find_rare(const Cqe* entries, uint32_t from, uint32_t count) {
  for (; from < count; from++) {
    const CqeTag tag = tag_of(entries[from].tag);
    const bool is_usual = tag.kind == CqeKind::kToken || tag.kind == CqeKind::kVector;
    if (!is_usual || tag.finish_reason != FinishReason::kNone) break;
  }
  return from;
}

SharedMemoryPoller* blink_shm_poller_start(const Cqe* queue, uint32_t entries, uint32_t head, int32_t event_fd,
                                           uint32_t interval_us) {
  return new SharedMemoryPoller(queue, entries, head, event_fd, interval_us);
}
void blink_shm_poller_expect(SharedMemoryPoller* poller, uint32_t head, uint32_t active) {
  poller->expect(head, active != 0);
}
void blink_shm_poller_stop(SharedMemoryPoller* poller) { delete poller; }

// A StoreWord of a region in this host's memory.
void blink_store_at(void* region, uint64_t offset, uint32_t value) {
  store_release(*reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(region) + offset), value);
}
LeaseRenewer* blink_lease_renewer_start(StoreWord store, void* context, uint64_t offset, uint32_t value,
                                        uint32_t grace_ms) {
  return new LeaseRenewer(store, context, offset, value, grace_ms);
}
void blink_lease_renewer_renew(LeaseRenewer* renewer) { renewer->renew(); }
void blink_lease_renewer_stop(LeaseRenewer* renewer) { delete renewer; }

// The chained hashes of `blocks` blocks of tokens behind `root`.
void blink_hash_blocks(const uint8_t* key, const uint8_t* root, const int32_t* tokens, uint32_t blocks,
                       uint32_t block_size, Hash* out) {
  Hash before = hash_of_bytes(root);
  for (uint32_t i = 0; i < blocks; i++)
    out[i] = before = hash_block(hash_of_bytes(key), before, tokens + uint64_t(i) * block_size, block_size);
}

// Build the automaton of a graph; see automaton/build.h.
int32_t blink_automaton_build(const Graph* graph, uint8_t* out, uint8_t* is_in_conflict) {
  return build_automaton(*graph, out, is_in_conflict);
}

// Languages (automaton/language.h): the first two return how many words the thread may take, or a BuildError.
int32_t blink_language_build(const Graph* graph) {
  return keep_language([&] { return build_language(*graph); });
}
int32_t blink_language_combine(const uint32_t* one, const uint32_t* other, uint32_t op) {
  return keep_language([&] { return Product(one, other, LanguageOp(op)).run(); });
}
uint64_t blink_language_work() { return language_work; }
void blink_language_take(uint32_t* out) { std::copy(made_language.begin(), made_language.end(), out); }
uint32_t blink_list_allowed(ConstrainedRow* row) { return list_allowed(*row); }

void blink_json_weigh(const char* text, uint64_t bytes, JsonWeight* out) { *out = weigh_json(text, bytes); }

Collector* blink_collector_start(ReadRegion read, void* context, uint64_t cq_offset, uint32_t entries, uint32_t head,
                                 int32_t event_fd, uint32_t interval_us) {
  return new Collector(read, context, cq_offset, entries, head, event_fd, interval_us);
}
void blink_collector_expect(Collector* collector, uint32_t head, uint32_t active) {
  collector->expect(head, active != 0);
}
uint32_t blink_collector_drain(Collector* collector, uint32_t head, Cqe* out, uint32_t max) {
  return collector->drain(head, out, max);
}
void blink_collector_stop(Collector* collector) { delete collector; }
// The pause of both, for tests.
uint64_t blink_pause_ns(uint64_t silence_ns, uint64_t rhythm_ns, uint64_t interval_ns) {
  using std::chrono::nanoseconds;
  return uint64_t(pause_after(nanoseconds(silence_ns), nanoseconds(rhythm_ns), nanoseconds(interval_ns)).count());
}
// The rhythm after `count` arrivals, for tests.
uint64_t blink_rhythm_ns(const uint64_t* longest_ns, const uint64_t* least_ns, uint32_t count, uint64_t interval_ns) {
  using std::chrono::nanoseconds;
  Rhythm rhythm;
  for (uint32_t i = 0; i < count; i++)
    rhythm.note(nanoseconds(longest_ns[i]), nanoseconds(least_ns[i]), nanoseconds(interval_ns));
  return uint64_t(rhythm.gap.count());
}

void blink_sample(const SampledRows* rows, ThreadPool* pool) { sample_rows(*rows, pool); }

void blink_rms_norm(float* out, const float* x, float* residual, const float* weight, uint32_t rows, uint32_t size,
                    float eps) {
  rms_norm(out, x, residual, weight, rows, size, eps);
}

void blink_rotate_and_store(float* qkv, const float* rotation, const int32_t* slots, void* keys, void* values,
                            uint32_t is_half, uint32_t tokens, uint32_t query_heads, uint32_t kv_heads,
                            uint32_t head_dim, uint32_t rotary_dim, const float* query_norm, const float* key_norm,
                            float eps) {
  with_cells(is_half, [&]<class Cell>(Cell) {
    rotate_and_store(qkv, rotation, slots, static_cast<Cell*>(keys), static_cast<Cell*>(values),
                     {tokens, query_heads, kv_heads, head_dim, rotary_dim}, {query_norm, key_norm, eps});
  });
}

void blink_gate_rows(const float* gate_up, uint32_t rows, uint32_t size, float* out, ThreadPool* pool) {
  gate_rows(gate_up, rows, size, out, *pool);
}

void blink_run_layers(const DenseStep* step, const DenseLayer* layers, uint32_t count, ThreadPool* pool) {
  DenseLayers(*step, *pool).run(layers, count);
}

ThreadPool* blink_thread_pool_start(uint32_t helpers) { return new ThreadPool(helpers); }
void blink_thread_pool_stop(ThreadPool* pool) { delete pool; }

void blink_attend_rows(const float* query, uint64_t query_stride, const void* cache, uint32_t is_half,
                       uint64_t cache_rows, const int32_t* blocks, const int64_t* positions, const float* sinks,
                       float* out, uint32_t rows, uint32_t row_blocks, uint32_t block_size, uint32_t kv_heads,
                       uint32_t group, uint32_t head_dim, uint32_t window, float scale, float softcap,
                       ThreadPool* pool) {
  with_cells(is_half, [&]<class Cell>(Cell) {
    const RowAttention<Cell> attention{query,      query_stride, static_cast<const Cell*>(cache),
                                       cache_rows, blocks,       positions,
                                       sinks,      out,          rows,
                                       row_blocks, block_size,   kv_heads,
                                       group,      head_dim,     window,
                                       scale,      softcap};
    attend_rows(attention, *pool);
  });
}

// Values and bytes of a format's block; 0 if it has no kernels.
uint32_t blink_gguf_block_values(uint64_t format) { return block_size(GgufFormat(format)).values; }
uint32_t blink_gguf_block_bytes(uint64_t format) { return block_size(GgufFormat(format)).bytes; }
uint32_t blink_has_gguf_kernels(Isa isa) { return find_gguf_kernels(isa) != nullptr; }
void blink_multiply_gguf(Isa isa, const GgufWeight* weight, const float* x, uint32_t x_rows, float* out,
                         ThreadPool* pool) {
  multiply(*find_gguf_kernels(isa), *weight, x, x_rows, out, *pool);
}
uint32_t blink_has_bf16_kernel(Bf16Isa isa) { return find_bf16_kernel(isa) != nullptr; }
void blink_multiply_gguf_bf16(Bf16Isa isa, const GgufWeight* weight, const float* x, uint32_t x_rows, float* out,
                              ThreadPool* pool) {
  multiply_bf16(find_bf16_kernel(isa), *weight, x, x_rows, out, *pool);
}
uint32_t blink_has_int16_kernel(Int16Isa isa) { return find_int16_kernel(isa) != nullptr; }
void blink_multiply_gguf_int16(Int16Isa isa, const GgufWeight* weight, const float* x, uint32_t x_rows, float* out,
                               ThreadPool* pool) {
  multiply_int16(find_int16_kernel(isa), *weight, x, x_rows, out, *pool);
}
void blink_dequantize_gguf(Isa isa, const GgufWeight* weight, float* out, ThreadPool* pool) {
  dequantize(*find_gguf_kernels(isa), *weight, out, *pool);
}
uint32_t blink_take_gguf_rows(Isa isa, const GgufWeight* weight, const int32_t* rows, uint32_t count, float* out) {
  return take_rows(*find_gguf_kernels(isa), *weight, rows, count, out);
}

}  // extern "C"
