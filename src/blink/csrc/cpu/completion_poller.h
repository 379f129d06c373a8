// SPDX-License-Identifier: Apache-2.0
// A thread that polls for completions while some are expected, and wakes an event loop. It is needed because neither a
// GPU nor a network card signals a process. It holds no interpreter lock while it polls.
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

#include "region/layout.h"

namespace blink {

// The pause until the next look, never less than the configured interval and never more than a millisecond.
// Where the last completions came `rhythm` after those before them, the next are expected then: few looks before, one
// each interval around that time. From then on, or at once where there is no rhythm, the longer nothing has come the
// longer the pause: a 32nd of that time. So a completion is seen late by a 32nd of its time at most, those of regular
// steps by an interval, and an engine of slow steps on the same cores is not disturbed.
inline std::chrono::nanoseconds pause_after(std::chrono::nanoseconds silence, std::chrono::nanoseconds rhythm,
                                            std::chrono::nanoseconds interval) {
  constexpr std::chrono::nanoseconds longest = std::chrono::milliseconds(1);
  const std::chrono::nanoseconds early = rhythm - rhythm / 16;
  const std::chrono::nanoseconds pause = silence < early ? early - silence : (silence - early) / 32;
  return std::max(interval, std::min(pause, longest));
}

// What one step's completions after the other tell of the next.
struct Rhythm {
  std::chrono::nanoseconds gap{0};  // until the next, as far as one can tell; 0: not known

  // Completions were seen `longest` after the last, and nothing was there at `least`. A gap of few intervals is passed
  // over: there one looks each interval anyway.
  void note(std::chrono::nanoseconds longest, std::chrono::nanoseconds least, std::chrono::nanoseconds interval) {
    constexpr int few = 16;
    if (longest < few * interval) return;
    const std::chrono::nanoseconds now = least < few * interval ? std::chrono::nanoseconds(0) : least;
    gap = std::min(now, last_);  // after one slow step the next may be as quick as those before
    last_ = now;
  }

 private:
  std::chrono::nanoseconds last_{0};
};

// Whether a completion is of a step's end: others come when a sequence is admitted or refused.
inline bool ends_step(const Cqe& entry) {
  const CqeKind kind = tag_of(entry.tag).kind;
  return kind == CqeKind::kToken || kind == CqeKind::kTopLogprob || kind == CqeKind::kVector;
}

class CompletionPoller {
 public:
  virtual ~CompletionPoller() = default;
  CompletionPoller(const CompletionPoller&) = delete;
  CompletionPoller& operator=(const CompletionPoller&) = delete;

 protected:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;

  CompletionPoller(int event_fd, uint32_t interval_us) : interval_(interval_us), event_fd_(event_fd) {}

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

  void pause(Lock& lock) {
    looked_ = Clock::now();
    const std::chrono::nanoseconds rhythm = in_step_ ? rhythm_.gap : std::chrono::nanoseconds(0);
    changed_.wait_for(lock, pause_after(looked_ - since_, rhythm, interval_));
  }
  // Completions are expected from now on, at first those of admission.
  void begin() {
    since_ = Clock::now();
    in_step_ = false;
  }
  // Completions have come; those of a step's end tell the rhythm.
  void note_arrival(bool ends_step) {
    const Clock::time_point now = Clock::now();
    if (ends_step) rhythm_.note(now - since_, looked_ - since_, interval_);
    since_ = now;
    in_step_ = true;
  }
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
  Rhythm rhythm_;
  Clock::time_point looked_ = since_;  // when nothing was there
  bool in_step_ = false;               // completions have come since they are expected
  bool active_ = false;                // completions are expected
  bool woken_ = false;                 // the event loop was woken and has not answered by expect()
  bool stopping_ = false;

 private:
  const int event_fd_;
  std::thread thread_;
};

}  // namespace blink
