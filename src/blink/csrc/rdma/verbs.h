// SPDX-License-Identifier: Apache-2.0
// One end of an RDMA connection: device, protection domain, completion queue and one reliable queue pair.
// Each connection has a protection domain of its own, so that its keys open nothing to any other connection.
#pragma once

#include <infiniband/verbs.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace blink {

// A failure of set-up, with errno where a call gave one.
struct VerbsError : std::runtime_error {
  VerbsError(const std::string& text, int code)
      : std::runtime_error(text + (code ? std::string(": ") + strerror(code) : "")), code(code) {}
  int code;
};

// What the other end must know of this one; plain data, sent over the control connection.
struct EndInfo {
  uint8_t gid[16];
  uint32_t qpn;
  uint32_t psn;
  uint32_t lid;
  uint32_t mtu;  // ibv_mtu
};

constexpr uint32_t kSendEntries = 256;
constexpr uint32_t kMaxInline = 256;  // an SQE
constexpr uint8_t kReadsInFlight = 4;
constexpr uint8_t kAckTimeout = 14;  // 4.096 us << 14 = 67 ms
constexpr uint8_t kRetries = 7;
constexpr uint8_t kHopLimit = 64;

class End {
 public:
  // An empty name takes the first device with an active port; gid_index < 0 chooses the address.
  End(const std::string& device, int gid_index) {
    try {
      open(device);
      choose_gid(gid_index);
      create();
    } catch (...) {
      close();
      throw;
    }
  }
  ~End() { close(); }
  End(const End&) = delete;
  End& operator=(const End&) = delete;

  // Register memory until the end's life; the keys open exactly these bytes.
  const ibv_mr& add_memory(void* address, uint64_t bytes, int access) {
    ibv_mr* memory = ibv_reg_mr(domain_, address, bytes, access);
    if (memory == nullptr) throw VerbsError("cannot register " + std::to_string(bytes) + " bytes of memory", errno);
    memories_.push_back(memory);
    return *memory;
  }

  EndInfo info() const {
    EndInfo info{};
    std::memcpy(info.gid, gid_.raw, sizeof info.gid);
    info.qpn = pair_->qp_num;
    info.psn = psn();
    info.lid = port_attributes_.lid;
    info.mtu = port_attributes_.active_mtu;
    return info;
  }

  // Accept the peer's requests. An end that only answers stays in this state: it can send nothing.
  void receive_from(const EndInfo& peer) {
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_RTR;
    a.path_mtu = ibv_mtu(std::min<uint32_t>(peer.mtu, port_attributes_.active_mtu));
    a.dest_qp_num = peer.qpn;
    a.rq_psn = peer.psn & 0xffffff;
    a.max_dest_rd_atomic = kReadsInFlight;
    a.min_rnr_timer = 12;
    a.ah_attr.port_num = port_;
    a.ah_attr.dlid = uint16_t(peer.lid);
    a.ah_attr.is_global = port_attributes_.link_layer == IBV_LINK_LAYER_ETHERNET || peer.lid == 0;
    std::memcpy(a.ah_attr.grh.dgid.raw, peer.gid, sizeof peer.gid);
    a.ah_attr.grh.sgid_index = uint8_t(gid_index_);
    a.ah_attr.grh.hop_limit = kHopLimit;
    modify(a,
           IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
               IBV_QP_MIN_RNR_TIMER,
           "there is no RDMA path to the other end");
  }
  void enable_sending() {
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_RTS;
    a.timeout = kAckTimeout;
    a.retry_cnt = kRetries;
    a.rnr_retry = kRetries;
    a.sq_psn = psn();
    a.max_rd_atomic = kReadsInFlight;
    modify(
        a,
        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
        "the RDMA connection cannot be opened");
  }

  ibv_qp* pair() { return pair_; }
  ibv_cq* completions() { return completions_; }
  uint32_t max_inline() const { return max_inline_; }

 private:
  uint32_t psn() const { return (pair_->qp_num * 2654435761u) & 0xffffff; }

  void open(const std::string& device) {
    int count = 0;
    ibv_device** list = ibv_get_device_list(&count);
    for (int i = 0; i < count && context_ == nullptr; i++)
      if (device.empty() || device == ibv_get_device_name(list[i])) try_open(list[i]);
    if (list != nullptr) ibv_free_device_list(list);
    if (context_ != nullptr) return;
    if (count == 0) throw VerbsError("this machine has no RDMA device", 0);
    throw VerbsError(device.empty() ? "no RDMA device has an active port"
                                    : "the RDMA device " + device + " is not there or has no active port",
                     0);
  }
  // Keep the device if one of its ports is up.
  void try_open(ibv_device* device) {
    context_ = ibv_open_device(device);
    ibv_device_attr attributes{};
    if (context_ == nullptr || ibv_query_device(context_, &attributes)) return close();
    for (port_ = 1; port_ <= attributes.phys_port_cnt; port_++)
      if (ibv_query_port(context_, port_, &port_attributes_) == 0 && port_attributes_.state == IBV_PORT_ACTIVE) return;
    close();
  }

  // Prefer a RoCE v2 address of IPv4, then any RoCE v2 one; on InfiniBand, the first.
  void choose_gid(int index) {
    int best = 0;
    for (int i = 0; index < 0 && i < port_attributes_.gid_tbl_len; i++) {
      ibv_gid_entry entry{};
      if (ibv_query_gid_ex(context_, port_, uint32_t(i), &entry, 0) || entry.gid_type != IBV_GID_TYPE_ROCE_V2) continue;
      static constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
      const int rank = std::memcmp(entry.gid.raw, kMapped, sizeof kMapped) == 0 ? 2 : 1;
      if (rank > best) best = rank, gid_index_ = i;
    }
    if (index >= 0) gid_index_ = index;
    static constexpr ibv_gid kNone{};  // of an index that is not in use
    if (ibv_query_gid(context_, port_, gid_index_, &gid_) || std::memcmp(&gid_, &kNone, sizeof gid_) == 0)
      throw VerbsError("the RDMA device has no address " + std::to_string(gid_index_), errno);
  }

  void create() {
    if ((domain_ = ibv_alloc_pd(context_)) == nullptr) throw VerbsError("cannot allocate a protection domain", errno);
    completions_ = ibv_create_cq(context_, 2 * kSendEntries, nullptr, nullptr, 0);
    if (completions_ == nullptr) throw VerbsError("cannot create a completion queue", errno);
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = completions_;
    init.qp_type = IBV_QPT_RC;
    init.cap = {kSendEntries, 1, 1, 1, kMaxInline};
    pair_ = ibv_create_qp(domain_, &init);
    if (pair_ == nullptr) {  // a device with less room for inline data
      init.cap = {kSendEntries, 1, 1, 1, 0};
      pair_ = ibv_create_qp(domain_, &init);
    }
    if (pair_ == nullptr) throw VerbsError("cannot create an RDMA queue pair", errno);
    max_inline_ = init.cap.max_inline_data;
    ibv_qp_attr a{};
    a.qp_state = IBV_QPS_INIT;
    a.port_num = port_;
    // The most that any memory of this end may allow; each memory's own flags decide.
    a.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    modify(a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
           "the RDMA queue pair cannot be initialised");
  }

  void modify(ibv_qp_attr& attributes, int mask, const char* failure) {
    if (const int code = ibv_modify_qp(pair_, &attributes, mask)) throw VerbsError(failure, code);
  }

  void close() {
    if (pair_ != nullptr) ibv_destroy_qp(pair_);
    if (completions_ != nullptr) ibv_destroy_cq(completions_);
    for (ibv_mr* memory : memories_) ibv_dereg_mr(memory);
    if (domain_ != nullptr) ibv_dealloc_pd(domain_);
    if (context_ != nullptr) ibv_close_device(context_);
    pair_ = nullptr, completions_ = nullptr, domain_ = nullptr, context_ = nullptr;
    memories_.clear();
  }

  ibv_context* context_ = nullptr;
  ibv_pd* domain_ = nullptr;
  ibv_cq* completions_ = nullptr;
  ibv_qp* pair_ = nullptr;
  std::vector<ibv_mr*> memories_;
  ibv_port_attr port_attributes_{};
  ibv_gid gid_{};
  uint8_t port_ = 1;
  int gid_index_ = 0;
  uint32_t max_inline_ = 0;
};

}  // namespace blink
