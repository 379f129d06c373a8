// SPDX-License-Identifier: Apache-2.0
// The C API of the RDMA library, called from Python through ctypes. No function throws; a failure leaves its text.
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
End* blink_verbs_end_open(const char* device, int32_t gid_index) {
  return guarded([&] { return new End(device, gid_index); });
}
void blink_verbs_end_close(End* end) { delete end; }
void blink_verbs_end_info(const End* end, EndInfo* out) { *out = end->info(); }
// Let the peer read these bytes, and write them if `writable`; returns the remote key.
uint32_t blink_verbs_end_add_memory(End* end, void* address, uint64_t bytes, uint32_t writable) {
  return guarded([&] {
    const int access = IBV_ACCESS_REMOTE_READ | (writable ? IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE : 0);
    return end->add_memory(address, bytes, access).rkey;
  });
}
uint32_t blink_verbs_end_receive_from(End* end, const EndInfo* peer) {
  return guarded([&] { return end->receive_from(*peer), 1u; });
}

// The frontend's end, and the link over it.
VerbsLink* blink_verbs_link_open(const char* device, int32_t gid_index) {
  return guarded([&] { return new VerbsLink(device, gid_index); });
}
void blink_verbs_link_close(VerbsLink* link) { delete link; }
void blink_verbs_link_info(const VerbsLink* link, EndInfo* out) { *out = link->info(); }
uint32_t blink_verbs_link_connect(VerbsLink* link, const EndInfo* peer, const RemoteMemory* shared,
                                  const RemoteMemory* pair) {
  return guarded([&] { return link->connect(*peer, *shared, *pair), 1u; });
}
void blink_verbs_link_write(VerbsLink* link, uint64_t offset, const void* data, uint32_t bytes) {
  link->write(offset, data, bytes, false);
}
// A renewer calls it too: a StoreWord whose context is the link.
void blink_verbs_link_store_u32(void* link, uint64_t offset, uint32_t value) {
  static_cast<VerbsLink*>(link)->write(offset, &value, sizeof value, true);
}
// A collector calls it too: a ReadRegion whose context is the link.
uint32_t blink_verbs_link_read(void* link, uint64_t offset, void* out, uint32_t bytes) {
  return static_cast<VerbsLink*>(link)->read(offset, out, bytes);
}
// Why the connection is broken; empty while it works. The text lives until the thread's next call.
const char* blink_verbs_link_failure(VerbsLink* link) {
  static thread_local std::string text;
  text = link->failure();
  return text.c_str();
}
void blink_verbs_link_counters(VerbsLink* link, LinkCounters* out) { *out = link->counters(); }

}  // extern "C"
