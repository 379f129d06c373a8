// SPDX-License-Identifier: Apache-2.0
// Polls for completions in this host's memory: it reads only the next entry and copies nothing.
#pragma once

#include "cpu/completion_poller.h"
#include "region/layout.h"

namespace blink {

class SharedMemoryPoller final : public CompletionPoller {
 public:
  SharedMemoryPoller(const Cqe* queue, uint32_t entries, uint32_t head, int event_fd, uint32_t interval_us)
      : CompletionPoller(event_fd, interval_us), queue_(queue), entries_(entries), head_(head) {
    start();
  }
  ~SharedMemoryPoller() override { stop(); }

  // Look at the entry at `head` from now on; `active` says that completions are expected at all.
  void expect(uint32_t head, bool active) {
    const std::lock_guard lock(mutex_);
    if (!active_) begin();
    head_ = head;
    active_ = active;
    woken_ = false;
    changed_.notify_all();
  }

 private:
  bool arrived() const { return (load_acquire(queue_[head_ & (entries_ - 1)].tag) & 1) == cq_phase(head_, entries_); }

  void run(Lock& lock) override {
    while (!stopping_) {
      if (!active_ || woken_) {
        changed_.wait(lock, [&] { return stopping_ || (active_ && !woken_); });
      } else if (arrived()) {
        note_arrival(ends_step(queue_[head_ & (entries_ - 1)]));
        wake();
      } else if (interval_.count() == 0) {
        lock.unlock();
        std::this_thread::yield();
        lock.lock();
      } else {
        pause(lock);
      }
    }
  }

  const Cqe* const queue_;
  const uint32_t entries_;
  uint32_t head_;
};

}  // namespace blink
