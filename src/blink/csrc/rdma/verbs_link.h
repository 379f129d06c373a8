// SPDX-License-Identifier: Apache-2.0
// A frontend's way to its queue pair over RDMA: ordered writes, and reads that wait.
// The engine's processor takes no part in any of it.
#pragma once

#include <chrono>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "rdma/collector.h"
#include "rdma/verbs.h"
#include "region/layout.h"

namespace blink {

// Memory of the engine that this end may reach. `start` is counted from the region's start.
struct RemoteMemory {
  uint64_t start;
  uint64_t bytes;
  uint64_t address;
  uint32_t key;
  uint32_t reserved;
};

struct LinkCounters {
  uint64_t writes;
  uint64_t reads;
  uint64_t completions;  // of writes and reads
};

class VerbsLink {
 public:
  VerbsLink(const std::string& device, int gid_index) : end_(device, gid_index) {}

  EndInfo info() const { return end_.info(); }

  // Connect to the engine's end; `shared` is the region's header and control block, `pair` the queue pair.
  void connect(const EndInfo& peer, const RemoteMemory& shared, const RemoteMemory& pair) {
    shared_ = shared, pair_ = pair;
    const uint64_t bytes = align_up(pair.bytes + kLandingBytes, kPage);
    memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(kPage, bytes)));
    if (!memory_) throw VerbsError("cannot allocate memory", errno);
    std::memset(memory_.get(), 0, bytes);
    local_key_ = end_.add_memory(memory_.get(), bytes, IBV_ACCESS_LOCAL_WRITE).lkey;
    end_.receive_from(peer);
    end_.enable_sending();
  }

  // Write bytes; the engine sees them before whatever is written later. Never waits for the engine.
  void write(uint64_t offset, const void* data, uint32_t bytes, bool signalled) {
    std::unique_lock lock(mutex_);
    counters_.writes++;
    if (bytes <= end_.max_inline()) {
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

  // Read up to kLandingBytes, and wait for them; false after a failure, or if more is asked for.
  bool read(uint64_t offset, void* out, uint32_t bytes) {
    if (bytes > kLandingBytes) return false;
    const std::lock_guard one_at_a_time(reading_);
    std::unique_lock lock(mutex_);
    const uint64_t serial = post(lock, IBV_WR_RDMA_READ, landing(), bytes, offset, IBV_SEND_SIGNALED);
    counters_.reads++;
    if (!await(lock, serial)) return false;
    std::memcpy(out, landing(), bytes);
    return true;
  }

  // Why the connection is broken; empty while it works.
  std::string failure() {
    const std::lock_guard lock(mutex_);
    poll();
    return failure_;
  }
  LinkCounters counters() {
    const std::lock_guard lock(mutex_);
    return counters_;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr uint64_t kPage = 4096;
  static constexpr uint32_t kLandingBytes = Collector::kMaxRead * sizeof(Cqe);
  static constexpr uint32_t kUnsignalled = 32;                // at most so many in a row
  static constexpr auto kPatience = std::chrono::seconds(5);  // beyond all retries of the device

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
    for (int count; (count = ibv_poll_cq(end_.completions(), 16, done)) > 0;) {
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
    const RemoteMemory& memory = offset >= pair_.start ? pair_ : shared_;
    ibv_sge part{reinterpret_cast<uint64_t>(local), bytes, local_key_};
    ibv_send_wr request{}, *refused = nullptr;
    request.wr_id = ++posted_;
    request.sg_list = &part;
    request.num_sge = bytes > 0;
    request.opcode = opcode;
    request.wr.rdma.remote_addr = memory.address + (offset - memory.start);
    request.wr.rdma.rkey = memory.key;
    if (posted_ - signalled_serial_ >= kUnsignalled) flags |= IBV_SEND_SIGNALED;
    request.send_flags = flags;
    if (flags & IBV_SEND_SIGNALED) signalled_serial_ = posted_;
    if (const int code = ibv_post_send(end_.pair(), &request, &refused)) fail(strerror(code));
    return posted_;
  }

  std::unique_ptr<uint8_t, Free> memory_;  // the queue pair's image, then where reads land; outlives the end
  End end_;
  RemoteMemory shared_{}, pair_{};
  uint32_t local_key_ = 0;
  std::mutex reading_;  // of the landing; taken before mutex_
  std::mutex mutex_;    // of all that follows
  uint64_t posted_ = 0, completed_ = 0, signalled_serial_ = 0;
  std::deque<Source> sources_;
  std::string failure_;
  LinkCounters counters_{};
};

}  // namespace blink
