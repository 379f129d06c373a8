// SPDX-License-Identifier: Apache-2.0
// Renews a frontend's lease while its interpreter is busy: a thread changes the lease's word without the interpreter's
// lock. It stops some time after the frontend's last renew(), so that a frontend that hangs loses its lease.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace blink {

// Stores a word of the region. Called from the renewer's thread.
using StoreWord = void (*)(void* context, uint64_t offset, uint32_t value);

class LeaseRenewer {
 public:
  // Goes on from `value`, the word at `offset`.
  LeaseRenewer(StoreWord store, void* context, uint64_t offset, uint32_t value, uint32_t grace_ms)
      : store_(store), context_(context), offset_(offset), grace_(grace_ms), value_(value) {
    thread_ = std::thread([this] { run(); });
  }
  LeaseRenewer(const LeaseRenewer&) = delete;
  LeaseRenewer& operator=(const LeaseRenewer&) = delete;
  ~LeaseRenewer() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

  // The frontend lives: renew now, and for the time of grace from now on.
  void renew() {
    const std::lock_guard lock(mutex_);
    seen_ = Clock::now();
    due_ = true;
    changed_.notify_all();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kInterval{100};

  void run() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      if (due_ || Clock::now() - seen_ < grace_) {
        due_ = false;
        const uint32_t value = ++value_;
        lock.unlock();
        store_(context_, offset_, value);
        lock.lock();
      }
      changed_.wait_for(lock, kInterval, [&] { return stopping_ || due_; });
    }
  }

  const StoreWord store_;
  void* const context_;
  const uint64_t offset_;
  const std::chrono::milliseconds grace_;
  std::mutex mutex_;  // of all that follows
  std::condition_variable changed_;
  Clock::time_point seen_ = Clock::now();
  uint32_t value_;
  bool due_ = true;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace blink
