// SPDX-License-Identifier: Apache-2.0
// The scheduler's outside world on a CPU: one lane, and a loop on a thread that hands launches to the model's thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "scheduler/scheduler.h"

namespace blink {

// One lane: every collective is the identity. A launch only marks the batch as ready for whoever computes it.
struct SoloEnv {
  uint64_t clock_ns;  // 0: the machine's monotonic clock
  uint32_t lane() const { return 0; }
  uint32_t lanes() const { return 1; }
  void sync() const {}
  uint32_t fetch_add(uint32_t& word, uint32_t n) const { return (word += n) - n; }
  void raise(uint32_t& word, uint32_t n) const { word = blink::most(word, n); }
  template <class T>
  T share(T value) const {
    return value;
  }
  template <class T>
  T sum(T value) const {
    return value;
  }
  template <class T>
  T least(T value) const {
    return value;
  }
  template <class T>
  T most(T value) const {
    return value;
  }
  uint32_t scan(uint32_t value, uint32_t& total) const {
    total = value;
    return 0;
  }
  bool any(bool value) const { return value; }
  Outcome outcome(const StepOutput& output, uint64_t step) const { return read_outcome(output, step); }
  bool launch(uint32_t, uint32_t) const { return true; }
  bool copy(CopyOrder&) const { return true; }
  uint64_t now() const {
    if (clock_ns != 0) return clock_ns;
    return uint64_t(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
  }
};

// The CPU engine's: its model reads the host's memory, so copies take no time.
struct LoopEnv : SoloEnv {
  bool copy(CopyOrder& copy) const {
    store_release(copy.done, copy.ordered);
    return true;
  }
};

// A pass at recorded times: when it began, and when it launched.
struct ReplayEnv : SoloEnv {
  uint64_t launched_ns;
  mutable bool has_begun = false;
  uint64_t now() const {
    const bool is_first = !has_begun;
    has_begun = true;
    return is_first ? clock_ns : launched_ns;
  }
};

// The CPU engine's scheduler thread. The model's thread calls wait() and finish() in turn.
class Loop {
 public:
  explicit Loop(State& state) : state_(state), thread_([this] { run(); }) {}
  ~Loop() { stop(); }

  // StepKind of the next launch; -1 after the timeout; -2 once the scheduler has ended.
  int32_t wait(uint32_t timeout_ms) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return launched_ || ended_; });
    if (launched_) {
      launched_ = false;
      return int32_t(kind_in_flight(state_));
    }
    return ended_ ? -2 : -1;
  }

  // failed: as StepOutput has it.
  void finish(uint32_t failed) {
    const StepBuffers& launched = buffers_of(state_, kind_in_flight(state_));
    launched.output->failed = failed;
    store_release(launched.output->done_step, launched.header->step);
    const std::lock_guard lock(mutex_);
    finished_ = true;
    changed_.notify_all();
  }

  StepResult stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
    return result_;
  }

 private:
  void run() {
    LoopEnv env{};
    uint32_t idle_passes = 0;
    StepResult result = StepResult::kIdle;
    while (result != StepResult::kStopped && result != StepResult::kFailed) {
      result = step(env, state_);
      idle_passes = result == StepResult::kIdle ? idle_passes + 1 : 0;
      std::unique_lock lock(mutex_);
      if (stopping_) break;
      launched_ = launched_ || result == StepResult::kLaunched;
      if (launched_) changed_.notify_all();
      if (result == StepResult::kStopped || result == StepResult::kFailed) break;
      changed_.wait_for(lock, pause(result, idle_passes), [&] { return finished_ || stopping_; });
      finished_ = false;
    }
    const std::lock_guard lock(mutex_);
    result_ = result;
    ended_ = true;
    changed_.notify_all();
  }

  // Frontends cannot wake this thread: it looks again soon after work, and a thousand times a second when idle. While
  // the model computes there is only intake to do, which the end of the step would do too: no need to disturb it often.
  std::chrono::microseconds pause(StepResult result, uint32_t idle_passes) const {
    if (result == StepResult::kHeld) return std::chrono::microseconds(held_us());
    if (result != StepResult::kIdle) return std::chrono::microseconds(5000);
    return std::chrono::microseconds(idle_passes < 2000 ? 50 : 1000);
  }

  // As long as no submission should wait, or until the hold ends.
  uint64_t held_us() const {
    const uint64_t now = SoloEnv{0}.now(), until = state_.held_until_ns;
    return least(uint64_t(200), until > now ? (until - now) / 1000 : 0);
  }

  State& state_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool launched_ = false, finished_ = false, stopping_ = false, ended_ = false;
  StepResult result_ = StepResult::kIdle;
  std::thread thread_;
};

}  // namespace blink
