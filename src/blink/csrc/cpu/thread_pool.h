// SPDX-License-Identifier: Apache-2.0
// Threads that help the caller with one piece of work after the other. PyTorch's pool waits at the end of each piece
// for all of its threads, whether they had a core or not. Here the caller waits only for those that have begun. So it
// does not wait for a helper that comes late because other programs use the same cores.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "region/platform.h"

namespace blink {

class ThreadPool {
 public:
  explicit ThreadPool(uint32_t helpers) : shares_(helpers + 1) {
    for (uint32_t i = 1; i <= helpers; ++i) threads_.emplace_back([this, i] { help(i); });
  }
  ~ThreadPool() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Call work(i) once for each i below count, on the caller and on helpers that come in time: each begins with a part
  // of its own, the same each time, and then takes what is left of the others'. If another thread's work is under way,
  // the caller is alone.
  template <class Work>
  void share(uint64_t count, const Work& work) {
    std::unique_lock busy(busy_, std::try_to_lock);
    if (threads_.empty() || count < 2 || !busy.owns_lock()) {
      for (uint64_t i = 0; i < count; ++i) work(i);
      return;
    }
    for (uint64_t i = 0; i < shares_.size(); ++i) {
      shares_[i].next = count * i / shares_.size();
      shares_[i].end = count * (i + 1) / shares_.size();
    }
    context_ = &work;
    call_ = [](const void* context, uint64_t i) { (*static_cast<const Work*>(context))(i); };
    const uint64_t open = (state_ | kOpen) + kPiece;
    state_ = open;
    if (sleepers_ != 0) {
      const std::lock_guard lock(mutex_);
      changed_.notify_all();
    }
    take(0);
    state_ &= ~kOpen;
    for (uint32_t looks = 1; (state_ & kInside) != 0; ++looks) {
      relax();
      if (looks % 4096 == 0) std::this_thread::yield();  // who has begun may have lost its core
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  // The state: whether helpers may begin, how many have and are not done, and which piece of work it is.
  static constexpr uint64_t kOpen = 1, kHelper = 2, kInside = 0xfffe, kPiece = 0x10000;
  // How long a helper looks for more work before it sleeps: what lies between two products of a step.
  static constexpr std::chrono::microseconds kPatience{200};

  struct alignas(128) Share {
    std::atomic<uint64_t> next{0};
    uint64_t end = 0;
  };

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  void take(uint32_t own) {
    for (uint64_t i = 0; i < shares_.size(); ++i) {
      Share& share = shares_[(own + i) % shares_.size()];
      for (uint64_t item = share.next++; item < share.end; item = share.next++) call_(context_, item);
    }
  }

  void help(uint32_t own) {
    uint64_t done = 0;  // the piece that was helped with
    while (wait(done)) {
      uint64_t state = state_;
      while ((state & kOpen) != 0 && !state_.compare_exchange_weak(state, state + kHelper)) {
      }
      done = state / kPiece;
      if ((state & kOpen) == 0) continue;
      take(own);
      state_ -= kHelper;
    }
  }

  // Wait for a piece that is not `done`; false once the pool ends.
  bool wait(uint64_t done) {
    const auto has_news = [&] { return stopping_ || state_ / kPiece != done; };
    for (const Clock::time_point start = Clock::now(); Clock::now() - start < kPatience;)
      for (uint32_t i = 0; i < 32; ++i) {
        if (has_news()) return !stopping_;
        relax();
      }
    std::unique_lock lock(mutex_);
    ++sleepers_;
    changed_.wait(lock, has_news);
    --sleepers_;
    return !stopping_;
  }

  // Of the piece of work: written while no helper may begin, so none reads them.
  std::vector<Share> shares_;
  const void* context_ = nullptr;
  void (*call_)(const void*, uint64_t) = nullptr;
  std::vector<std::thread> threads_;
  std::mutex busy_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<uint64_t> state_{0};
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace blink
