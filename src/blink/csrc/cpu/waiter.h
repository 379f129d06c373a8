// SPDX-License-Identifier: Apache-2.0
// A frontend's completion watch: a thread that looks at the next completion entry and wakes the event loop.
// The GPU cannot signal a host process, so somebody must look; this thread holds no interpreter lock while it does.
#pragma once

#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "region/layout.h"

namespace blink {

class Waiter {
 public:
  Waiter(const Cqe* queue, uint32_t entries, int event_fd, uint32_t interval_us)
      : queue_(queue), entries_(entries), event_fd_(event_fd), interval_(interval_us), thread_([this] { run(); }) {}
  ~Waiter() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

  // Watch the entry at `head`; `active` says that completions are expected at all.
  void watch(uint32_t head, bool active) {
    const std::lock_guard lock(mutex_);
    if (head != head_ || signalled_ || !active_) armed_ = Clock::now();
    head_ = head;
    active_ = active;
    signalled_ = false;
    changed_.notify_all();
  }

 private:
  using Clock = std::chrono::steady_clock;

  // The longer nothing has come, the longer until the next look, up to a millisecond: a completion is seen late by a
  // sixteenth of its time at most, and an engine of slow steps on the same cores is not disturbed.
  Clock::duration pause() const {
    constexpr Clock::duration longest = std::chrono::milliseconds(1);
    return std::max<Clock::duration>(interval_, std::min((Clock::now() - armed_) / 16, longest));
  }

  bool arrived() const { return (load_acquire(queue_[head_ & (entries_ - 1)].tag) & 1) == cq_phase(head_, entries_); }

  void run() {
    prctl(PR_SET_TIMERSLACK, 1000);
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      if (!active_ || signalled_) {
        changed_.wait(lock, [&] { return stopping_ || (active_ && !signalled_); });
      } else if (arrived()) {
        signalled_ = true;
        const uint64_t one = 1;
        // A full counter already wakes the reader.
        if (write(event_fd_, &one, sizeof one) < 0) continue;
      } else if (interval_.count() == 0) {
        lock.unlock();
        std::this_thread::yield();
        lock.lock();
      } else {
        changed_.wait_for(lock, pause());
      }
    }
  }

  const Cqe* queue_;
  uint32_t entries_;
  int event_fd_;
  std::chrono::microseconds interval_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Clock::time_point armed_ = Clock::now();
  uint32_t head_ = 0;
  bool active_ = false, signalled_ = false, stopping_ = false;
  std::thread thread_;
};

}  // namespace blink
