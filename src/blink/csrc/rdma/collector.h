// SPDX-License-Identifier: Apache-2.0
// Polls for completions in another machine's memory. It reads stretches of the queue by a function of whoever owns the
// connection. It keeps what has come until its reader has gone past it.
#pragma once

#include <deque>
#include <vector>

#include "cpu/completion_poller.h"
#include "region/layout.h"

namespace blink {

// Reads bytes of the region, and waits for them; 0 after a failure. Called from the collector's thread.
using ReadRegion = uint32_t (*)(void* context, uint64_t offset, void* out, uint32_t bytes);

class Collector final : public CompletionPoller {
 public:
  static constexpr uint32_t kMinRead = 16, kMaxRead = 512;  // completions of one read

  // The queue is at `cq_offset` of the region; `head` is the first position to collect.
  Collector(ReadRegion read, void* context, uint64_t cq_offset, uint32_t entries, uint32_t head, int event_fd,
            uint32_t interval_us)
      : CompletionPoller(event_fd, interval_us),
        read_(read),
        context_(context),
        cq_offset_(cq_offset),
        entries_(entries),
        next_(head),
        first_(head) {
    start();
  }
  ~Collector() override { stop(); }

  // Forget what is before `head`. Without `active` no completions are expected, and nothing is read.
  void expect(uint32_t head, bool active) {
    const std::lock_guard lock(mutex_);
    forget(head);
    woken_ = false;
    if (!ready_.empty()) wake();
    if (active && !active_) {
      begin();
      changed_.notify_all();
    }
    active_ = active;
  }

  // Copy what has come at `head` and behind it; returns how many.
  uint32_t drain(uint32_t head, Cqe* out, uint32_t max) {
    const std::lock_guard lock(mutex_);
    forget(head);
    const uint32_t count = std::min<uint32_t>(max, uint32_t(ready_.size()));
    std::copy_n(ready_.begin(), count, out);
    return count;
  }

 private:
  void forget(uint32_t head) {
    const uint32_t passed = head - first_;
    if (passed > ready_.size()) return;
    ready_.erase(ready_.begin(), ready_.begin() + passed);
    first_ = head;
  }

  // Read the next entries and take those that two reads have shown; true if there were any.
  // A read may fetch an entry's payload before its tag. One that shows a new tag therefore proves only that the payload
  // was written before the read ended: the next read, begun after that, brings the payload.
  bool collect(Lock& lock) {
    const uint32_t at = next_ & (entries_ - 1);
    const uint32_t count = std::min(read_size_, entries_ - at);
    lock.unlock();
    const uint32_t is_read = read_(context_, cq_offset_ + at * sizeof(Cqe), landing_.data(), count * sizeof(Cqe));
    lock.lock();
    broken_ = is_read == 0;
    if (broken_) return false;
    uint32_t seen = 0;
    while (seen < count && (landing_[seen].tag & 1) == cq_phase(next_ + seen, entries_)) seen++;
    const uint32_t proved = std::min(seen, seen_);
    ready_.insert(ready_.end(), landing_.begin(), landing_.begin() + proved);
    next_ += proved;
    seen_ = seen - proved;
    read_size_ = std::clamp(2 * seen, kMinRead, kMaxRead);
    return proved > 0;
  }

  void run(Lock& lock) override {
    while (!stopping_) {
      if (!active_ || broken_) {
        changed_.wait(lock, [&] { return stopping_ || (active_ && !broken_); });
        continue;
      }
      if (collect(lock)) note_arrival(ends_step(ready_.back()));
      if (!ready_.empty() && !woken_) wake();
      if (seen_ == 0 && !stopping_) pause(lock);
    }
  }

  const ReadRegion read_;
  void* const context_;
  const uint64_t cq_offset_;
  const uint32_t entries_;
  std::vector<Cqe> landing_ = std::vector<Cqe>(kMaxRead);
  uint32_t read_size_ = kMinRead;
  uint32_t next_;      // the position that is read next
  uint32_t seen_ = 0;  // entries there that one read has shown
  bool broken_ = false;
  std::deque<Cqe> ready_;  // from position first_ up to next_
  uint32_t first_;
};

}  // namespace blink
