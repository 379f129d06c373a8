// SPDX-License-Identifier: Apache-2.0
// ThreadEnv: the scheduler's lanes as real threads, with no more ordering between them than the GPU's block gives.
#pragma once

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "scheduler/scheduler.h"

namespace blink {

// What the lanes share: a barrier and one box each for collectives. The barrier gives up the processor while it waits.
class Team {
 public:
  explicit Team(uint32_t lanes) : barrier_(lanes), boxes_(lanes) {}
  uint32_t lanes() const { return uint32_t(boxes_.size()); }
  void sync() { barrier_.arrive_and_wait(); }
  void launch() { num_launches_.fetch_add(1, std::memory_order_release); }
  uint32_t num_launches() const { return num_launches_.load(std::memory_order_acquire); }

  template <class T>
  void put(uint32_t lane, const T& value) {
    static_assert(sizeof(T) <= sizeof(Box));
    std::memcpy(boxes_[lane].bytes, &value, sizeof(T));
  }
  template <class T>
  T get(uint32_t lane) const {
    T value;
    std::memcpy(&value, boxes_[lane].bytes, sizeof(T));
    return value;
  }

 private:
  struct alignas(64) Box {
    unsigned char bytes[64];
  };
  std::barrier<> barrier_;
  std::vector<Box> boxes_;
  std::atomic<uint32_t> num_launches_{0};
};

struct ThreadEnv {
  Team* team;
  uint32_t index;
  uint64_t clock_ns;  // 0: the machine's monotonic clock

  uint32_t lane() const { return index; }
  uint32_t lanes() const { return team->lanes(); }
  void sync() const { team->sync(); }
  uint32_t fetch_add(uint32_t& word, uint32_t n) const {
    return std::atomic_ref<uint32_t>(word).fetch_add(n, std::memory_order_relaxed);
  }
  void raise(uint32_t& word, uint32_t n) const {
    const std::atomic_ref<uint32_t> shared(word);
    for (uint32_t seen = shared.load(); seen < n && !shared.compare_exchange_weak(seen, n);) continue;
  }
  bool launch(uint32_t, uint32_t) const {
    team->launch();
    return true;
  }
  bool copy(CopyOrder&) const { return true; }
  uint64_t now() const {
    if (clock_ns != 0) return clock_ns;
    return uint64_t(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
  }

  bool any(bool value) const { return sum(uint32_t(value)) > 0; }
  Outcome outcome(const StepOutput& output, uint64_t step) const { return read_outcome(output, step); }

  template <class T>
  T share(T value) const {
    if (index == 0) team->put(0, value);
    sync();
    value = team->get<T>(0);
    sync();
    return value;
  }
  template <class T, class Combine>
  T reduce(T value, Combine combine) const {
    team->put(index, value);
    sync();
    value = team->get<T>(0);
    for (uint32_t i = 1; i < lanes(); i++) value = combine(value, team->get<T>(i));
    sync();
    return value;
  }
  template <class T>
  T sum(T value) const {
    return reduce(value, [](T a, T b) { return T(a + b); });
  }
  template <class T>
  T least(T value) const {
    return reduce(value, [](T a, T b) { return b < a ? b : a; });
  }
  template <class T>
  T most(T value) const {
    return reduce(value, [](T a, T b) { return a < b ? b : a; });
  }
  uint32_t scan(uint32_t value, uint32_t& total) const {
    team->put(index, value);
    sync();
    uint32_t before = 0;
    total = 0;
    for (uint32_t i = 0; i < lanes(); i++) {
      if (i == index) before = total;
      total += team->get<uint32_t>(i);
    }
    sync();
    return before;
  }
};

// Threads that run one pass at a time, together, when told.
class Lanes {
 public:
  explicit Lanes(uint32_t count) : team_(count), gate_(count + 1), results_(count) {
    for (uint32_t i = 0; i < count; i++) threads_.emplace_back([this, i] { run(i); });
  }
  ~Lanes() {
    state_ = nullptr;
    gate_.arrive_and_wait();
    for (std::thread& thread : threads_) thread.join();
  }

  // One pass of every lane; clock 0 is the machine's. Aborts if the lanes disagree on its result.
  StepResult step(State& state, uint64_t now_ns) {
    state_ = &state;
    now_ns_ = now_ns;
    gate_.arrive_and_wait();
    gate_.arrive_and_wait();
    for (const StepResult result : results_)
      if (result != results_[0]) std::abort();
    return results_[0];
  }

  // How many steps have been launched; acquires what the lanes wrote before.
  uint32_t num_launches() const { return team_.num_launches(); }

 private:
  void run(uint32_t index) {
    for (;;) {
      gate_.arrive_and_wait();
      if (state_ == nullptr) return;
      ThreadEnv env{&team_, index, now_ns_};
      results_[index] = blink::step(env, *state_);
      gate_.arrive_and_wait();
    }
  }

  Team team_;
  std::barrier<> gate_;
  State* state_ = nullptr;
  uint64_t now_ns_ = 0;
  std::vector<StepResult> results_;
  std::vector<std::thread> threads_;
};

}  // namespace blink
