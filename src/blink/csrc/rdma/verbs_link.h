// SPDX-License-Identifier: Apache-2.0
// A frontend's way to its queue pair over RDMA: ordered writes, word reads, and a thread that collects completions.
// The engine's processor takes no part in any of it.
#pragma once

#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "region/layout.h"
#include "rdma/verbs.h"

namespace blink {

// Memory of the engine that this end may reach. `start` is counted from the region's start.
struct RemoteWindow {
  uint64_t start;
  uint64_t bytes;
  uint64_t address;
  uint32_t key;
  uint32_t reserved;
};

struct ChannelCounters {
  uint64_t writes;
  uint64_t reads;
  uint64_t completions;  // of writes and reads
};

class Channel {
 public:
  Channel(const std::string& device, int gid_index) : endpoint_(device, gid_index) {}
  ~Channel() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

  EndpointInfo info() const { return endpoint_.info(); }

  // Connect to the engine's end; `shared` is the region's header and control block, `pair` the queue pair.
  void connect(const EndpointInfo& peer, const RemoteWindow& shared, const RemoteWindow& pair) {
    shared_ = shared, pair_ = pair;
    const uint64_t bytes = align_up(pair.bytes + kLandingBytes, kPage);
    memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(kPage, bytes)));
    if (!memory_) throw VerbsError("cannot allocate memory", errno);
    std::memset(memory_.get(), 0, bytes);
    local_key_ = endpoint_.add_memory(memory_.get(), bytes, IBV_ACCESS_LOCAL_WRITE).lkey;
    endpoint_.receive_from(peer);
    endpoint_.enable_sending();
  }

  // Write bytes; the engine sees them before whatever is written later. Never waits for the engine.
  void write(uint64_t offset, const void* data, uint32_t bytes, bool signalled) {
    std::unique_lock lock(mutex_);
    counters_.writes++;
    if (bytes <= endpoint_.max_inline()) {
      post(lock, IBV_WR_RDMA_WRITE, const_cast<void*>(data), bytes, offset,
           IBV_SEND_INLINE | (signalled ? IBV_SEND_SIGNALED : 0));
      return;
    }
    uint8_t* copy = memory_.get() + (offset - pair_.start);
    await_source(lock, copy, bytes);
    std::memcpy(copy, data, bytes);
    const uint64_t serial = post(lock, IBV_WR_RDMA_WRITE, copy, bytes, offset, signalled ? IBV_SEND_SIGNALED : 0);
    sources_.push_back({copy, bytes, serial});
  }

  // Read up to kScratchBytes, and wait for them; false after a failure, or if more is asked for.
  bool read(uint64_t offset, void* out, uint32_t bytes) {
    if (bytes > kScratchBytes) return false;
    std::unique_lock lock(mutex_);
    uint8_t* scratch = landing() + kMaxWindow * sizeof(Cqe);
    const uint64_t serial = post(lock, IBV_WR_RDMA_READ, scratch, bytes, offset, IBV_SEND_SIGNALED);
    counters_.reads++;
    if (!await(lock, serial)) return false;
    std::memcpy(out, scratch, bytes);
    return true;
  }

  // Collect completions from position `head` on in a thread of its own, which makes `event_fd` readable.
  void start(uint64_t cq_offset, uint32_t entries, uint32_t head, int event_fd, uint32_t interval_us) {
    cq_offset_ = cq_offset, entries_ = entries, next_ = head, event_fd_ = event_fd;
    interval_ = std::chrono::microseconds(interval_us);
    thread_ = std::thread([this] { run(); });
  }
  // Say whether completions are expected at all: without, the thread reads nothing.
  void watch(bool active) {
    const std::lock_guard lock(mutex_);
    signalled_ = false;
    if (!ready_.empty()) signal();
    if (active && !active_) changed_.notify_all();
    active_ = active;
  }
  uint32_t drain(Cqe* out, uint32_t max) {
    const std::lock_guard lock(mutex_);
    const uint32_t count = std::min<uint32_t>(max, uint32_t(ready_.size()));
    std::copy_n(ready_.begin(), count, out);
    ready_.erase(ready_.begin(), ready_.begin() + count);
    return count;
  }

  // Why the connection is broken; empty while it works.
  std::string failure() {
    const std::lock_guard lock(mutex_);
    poll();
    return failure_;
  }
  ChannelCounters counters() {
    const std::lock_guard lock(mutex_);
    return counters_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr uint64_t kPage = 4096;
  static constexpr uint32_t kMinWindow = 16, kMaxWindow = 512;  // completions of one read
  static constexpr uint32_t kScratchBytes = 4096;
  static constexpr uint64_t kLandingBytes = kMaxWindow * sizeof(Cqe) + kScratchBytes;
  static constexpr uint32_t kUnsignalled = 32;                       // at most so many in a row
  static constexpr auto kSlowest = std::chrono::microseconds(1000);  // between two reads while tokens are awaited
  static constexpr auto kPatience = std::chrono::seconds(5);         // beyond all retries of the device

  // Local bytes that the device may read until a write has completed.
  struct Source {
    const uint8_t* begin;
    uint32_t bytes;
    uint64_t serial;
  };
  struct Free {
    void operator()(uint8_t* memory) const { std::free(memory); }
  };

  uint8_t* landing() { return memory_.get() + pair_.bytes; }

  void fail(const std::string& reason) {
    if (failure_.empty()) failure_ = reason;
  }

  // Take what the device has finished. Requests of one queue pair finish in their order, so a serial number says it
  // all.
  void poll() {
    ibv_wc done[16];
    for (int count; (count = ibv_poll_cq(endpoint_.completions(), 16, done)) > 0;) {
      counters_.completions += uint64_t(count);
      for (int i = 0; i < count; i++) {
        if (done[i].status == IBV_WC_SUCCESS)
          completed_ = done[i].wr_id;
        else
          fail(ibv_wc_status_str(done[i].status));
      }
    }
  }

  bool await(std::unique_lock<std::mutex>& lock, uint64_t serial) {
    const auto deadline = Clock::now() + kPatience;
    for (uint32_t spins = 0;; spins++) {
      poll();
      if (!failure_.empty()) return false;
      if (completed_ >= serial) return true;
      lock.unlock();
      if (spins < 200)
        std::this_thread::yield();
      else
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      lock.lock();
      if (Clock::now() > deadline) fail("no answer");
    }
  }

  // Wait until the device no longer reads any of these bytes.
  void await_source(std::unique_lock<std::mutex>& lock, const uint8_t* begin, uint32_t bytes) {
    poll();
    while (!sources_.empty() && sources_.front().serial <= completed_) sources_.pop_front();
    uint64_t last = 0;
    for (const Source& s : sources_)
      if (s.begin < begin + bytes && begin < s.begin + s.bytes) last = s.serial;
    if (last == 0) return;
    if (last > signalled_serial_) post(lock, IBV_WR_RDMA_WRITE, memory_.get(), 0, pair_.start, IBV_SEND_SIGNALED);
    await(lock, last);
  }

  // Post one request and return its serial number. After a failure nothing is sent.
  uint64_t post(std::unique_lock<std::mutex>& lock, ibv_wr_opcode opcode, void* local, uint32_t bytes, uint64_t offset,
                unsigned flags) {
    if (posted_ - completed_ >= kSendEntries - 1 && !await(lock, posted_ - kSendEntries / 2)) return posted_;
    if (!failure_.empty()) return posted_;
    const RemoteWindow& window = offset >= pair_.start ? pair_ : shared_;
    ibv_sge piece{reinterpret_cast<uint64_t>(local), bytes, local_key_};
    ibv_send_wr request{}, *refused = nullptr;
    request.wr_id = ++posted_;
    request.sg_list = &piece;
    request.num_sge = bytes > 0;
    request.opcode = opcode;
    request.wr.rdma.remote_addr = window.address + (offset - window.start);
    request.wr.rdma.rkey = window.key;
    if (posted_ - signalled_serial_ >= kUnsignalled) flags |= IBV_SEND_SIGNALED;
    request.send_flags = flags;
    if (flags & IBV_SEND_SIGNALED) signalled_serial_ = posted_;
    if (const int code = ibv_post_send(endpoint_.pair(), &request, &refused)) fail(strerror(code));
    return posted_;
  }

  void signal() {
    signalled_ = true;
    const uint64_t one = 1;
    // A full counter already wakes the reader.
    if (::write(event_fd_, &one, sizeof one) < 0) return;
  }

  // Read the next entries and take those that two reads have shown; true if there were any.
  // A read may fetch an entry's payload before its tag. One that shows a new tag therefore proves only that the payload
  // was written before the read ended: the next read, posted after that, brings the payload.
  bool collect(std::unique_lock<std::mutex>& lock) {
    const uint32_t at = next_ & (entries_ - 1);
    const uint32_t count = std::min(window_, entries_ - at);
    const uint64_t serial =
        post(lock, IBV_WR_RDMA_READ, landing(), count * sizeof(Cqe), cq_offset_ + at * sizeof(Cqe), IBV_SEND_SIGNALED);
    counters_.reads++;
    if (!await(lock, serial)) return false;
    const Cqe* entries = reinterpret_cast<const Cqe*>(landing());
    uint32_t seen = 0;
    while (seen < count && (entries[seen].tag & 1) == cq_phase(next_ + seen, entries_)) seen++;
    const uint32_t proved = std::min(seen, seen_);
    ready_.insert(ready_.end(), entries, entries + proved);
    next_ += proved;
    seen_ = seen - proved;
    window_ = std::clamp(2 * seen, kMinWindow, kMaxWindow);
    return proved > 0;
  }

  void run() {
    prctl(PR_SET_TIMERSLACK, 1000);
    std::unique_lock lock(mutex_);
    Clock::time_point last = Clock::now();
    while (!stopping_) {
      if (!active_ || !failure_.empty()) {
        changed_.wait(lock, [&] { return stopping_ || (active_ && failure_.empty()); });
        last = Clock::now();
      }
      if (stopping_) break;
      if (collect(lock)) last = Clock::now();
      if (!ready_.empty() && !signalled_) signal();
      if (seen_ == 0) changed_.wait_for(lock, pause(Clock::now() - last));
    }
  }
  // The longer nothing has come, the longer the pause: a sixteenth of that time, within limits.
  std::chrono::microseconds pause(Clock::duration silence) const {
    return std::clamp(std::chrono::duration_cast<std::chrono::microseconds>(silence / 16),
                      std::min(interval_, kSlowest), kSlowest);
  }

  std::unique_ptr<uint8_t, Free> memory_;  // the queue pair's image, then where reads land; outlives the endpoint
  Endpoint endpoint_;
  RemoteWindow shared_{}, pair_{};
  uint32_t local_key_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t posted_ = 0, completed_ = 0, signalled_serial_ = 0;
  std::deque<Source> sources_;
  std::string failure_;
  ChannelCounters counters_{};
  uint64_t cq_offset_ = 0;
  uint32_t entries_ = 1, next_ = 0, seen_ = 0, window_ = kMinWindow;
  std::deque<Cqe> ready_;
  int event_fd_ = -1;
  std::chrono::microseconds interval_{0};
  bool active_ = false, signalled_ = false, stopping_ = false;
  std::thread thread_;
};

}  // namespace blink
