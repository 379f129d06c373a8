// SPDX-License-Identifier: Apache-2.0
// A thread that looks for completions while some are expected, and wakes an event loop. Neither a GPU nor a network
// card signals a process for a completion, so somebody must look; this thread holds no interpreter lock while it does.
#pragma once

#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace blink {

// The longer nothing has come, the longer until the next look: a sixteenth of that time, up to a millisecond, and never
// less than the configured interval. So a completion is seen late by a sixteenth of its time at most, and an engine of
// slow steps on the same cores is not disturbed.
inline std::chrono::nanoseconds pause_after(std::chrono::nanoseconds silence, std::chrono::nanoseconds interval) {
  constexpr std::chrono::nanoseconds longest = std::chrono::milliseconds(1);
  return std::max(interval, std::min(silence / 16, longest));
}

class Lookout {
 public:
  virtual ~Lookout() = default;
  Lookout(const Lookout&) = delete;
  Lookout& operator=(const Lookout&) = delete;

 protected:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;

  Lookout(int event_fd, uint32_t interval_us) : interval_(interval_us), event_fd_(event_fd) {}

  // Look until stopping_; the lock is held but for waits. Subclasses call start() when they are built, stop() before
  // they are not.
  virtual void run(Lock& lock) = 0;
  void start() {
    thread_ = std::thread([this] {
      prctl(PR_SET_TIMERSLACK, 1000);
      Lock lock(mutex_);
      run(lock);
    });
  }
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

  void pause(Lock& lock) { changed_.wait_for(lock, pause_after(Clock::now() - since_, interval_)); }
  void wake() {
    woken_ = true;
    const uint64_t one = 1;
    // A full counter already wakes the reader.
    if (write(event_fd_, &one, sizeof one) < 0) return;
  }

  const std::chrono::microseconds interval_;
  std::mutex mutex_;  // of all that follows, in subclasses too
  std::condition_variable changed_;
  Clock::time_point since_ = Clock::now();  // of the silence
  bool active_ = false;                     // completions are expected
  bool woken_ = false;                      // the event loop was woken and has not answered by expect()
  bool stopping_ = false;

 private:
  const int event_fd_;
  std::thread thread_;
};

}  // namespace blink
