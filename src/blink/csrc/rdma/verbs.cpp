// SPDX-License-Identifier: Apache-2.0
// The C API of the RDMA library, called from Python through ctypes. No function throws; a failure leaves its text
// behind.
#include "rdma/verbs_link.h"

using namespace blink;

namespace {

thread_local std::string last_error;
thread_local int last_code = 0;

template <class Body>
auto guarded(Body body) -> decltype(body()) {
  try {
    last_error.clear(), last_code = 0;
    return body();
  } catch (const VerbsError& error) {
    last_error = error.what(), last_code = error.code;
  } catch (const std::exception& error) {
    last_error = error.what(), last_code = 0;
  }
  return {};
}

}  // namespace

extern "C" {

// Why the thread's last call failed, and errno if a system call gave one; empty after a success.
const char* blink_verbs_error() { return last_error.c_str(); }
int32_t blink_verbs_errno() { return last_code; }

// The engine's end.
Endpoint* blink_endpoint_open(const char* device, int32_t gid_index) {
  return guarded([&] { return new Endpoint(device, gid_index); });
}
void blink_endpoint_close(Endpoint* endpoint) { delete endpoint; }
void blink_endpoint_info(const Endpoint* endpoint, EndpointInfo* out) { *out = endpoint->info(); }
// Let the peer read these bytes, and write them if `writable`; returns the remote key.
uint32_t blink_endpoint_add_memory(Endpoint* endpoint, void* address, uint64_t bytes, uint32_t writable) {
  return guarded([&] {
    const int access = IBV_ACCESS_REMOTE_READ | (writable ? IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE : 0);
    return endpoint->add_memory(address, bytes, access).rkey;
  });
}
uint32_t blink_endpoint_receive_from(Endpoint* endpoint, const EndpointInfo* peer) {
  return guarded([&] { return endpoint->receive_from(*peer), 1u; });
}

// The frontend's end.
Channel* blink_channel_open(const char* device, int32_t gid_index) {
  return guarded([&] { return new Channel(device, gid_index); });
}
void blink_channel_close(Channel* channel) { delete channel; }
void blink_channel_info(const Channel* channel, EndpointInfo* out) { *out = channel->info(); }
uint32_t blink_channel_connect(Channel* channel, const EndpointInfo* peer, const RemoteWindow* shared,
                               const RemoteWindow* pair) {
  return guarded([&] { return channel->connect(*peer, *shared, *pair), 1u; });
}
void blink_channel_write(Channel* channel, uint64_t offset, const void* data, uint32_t bytes) {
  channel->write(offset, data, bytes, false);
}
void blink_channel_store_u32(Channel* channel, uint64_t offset, uint32_t value) {
  channel->write(offset, &value, sizeof value, true);
}
uint32_t blink_channel_read(Channel* channel, uint64_t offset, void* out, uint32_t bytes) {
  return channel->read(offset, out, bytes);
}
void blink_channel_start(Channel* channel, uint64_t cq_offset, uint32_t entries, uint32_t head, int32_t event_fd,
                         uint32_t interval_us) {
  channel->start(cq_offset, entries, head, event_fd, interval_us);
}
void blink_channel_watch(Channel* channel, uint32_t active) { channel->watch(active != 0); }
uint32_t blink_channel_drain(Channel* channel, Cqe* out, uint32_t max) { return channel->drain(out, max); }
// Why the connection is broken; empty while it works. The text lives until the thread's next call.
const char* blink_channel_failure(Channel* channel) {
  static thread_local std::string text;
  text = channel->failure();
  return text.c_str();
}
void blink_channel_counters(Channel* channel, ChannelCounters* out) { *out = channel->counters(); }

}  // extern "C"
