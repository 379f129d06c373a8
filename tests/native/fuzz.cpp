// SPDX-License-Identifier: Apache-2.0
// A hostile frontend against the scheduler: random and mutated entries, words and heads, random arena contents (tokens,
// floats, hashes: also those of the honest one's prompts), a queue left unread under a live lease, while an honest
// frontend beside it must get the right tokens and no byte of its queue pair may change but by the scheduler.
//
// fuzz ENTRIES SEED: exit status 1 on any mismatch.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "cpu/host_env.h"
#include "rig.h"

using namespace blink;

namespace {

void expect(bool holds, const char* what, uint64_t detail) {
  if (holds) return;
  std::fprintf(stderr, "mismatch: %s (%llu)\n", what, static_cast<unsigned long long>(detail));
  std::exit(1);
}

constexpr uint32_t kHonest = 0, kHostile = 1, kIdle = 2;
constexpr uint64_t kTurnNs = 100'000, kStallTurns = 400;

// The honest frontend's request number `n`.
std::vector<int32_t> honest_prompt(uint32_t n) {
  std::vector<int32_t> tokens;
  for (uint32_t i = 0; i < 9 + n % 30; i++) tokens.push_back(int32_t((i * 5 + n / 7) % kVocab));
  return tokens;
}

// One request after the other, each checked token by token.
class Honest {
 public:
  explicit Honest(Rig& rig) : port_(rig, kHonest) {}
  Port& port() { return port_; }
  uint32_t answered() const { return answered_; }
  uint32_t submitted() const { return answered_ + !tokens_.empty(); }
  bool is_unread() const { return port_.num_unread() > 0; }

  void act() {
    port_.renew_lease();
    if (tokens_.empty()) {
      tokens_ = honest_prompt(answered_);
      wanted_ = tokens_.size() + 4;
      port_.submit(plain_request(uint64_t(answered_ + 1) << 32, 4), tokens_, 0);
    }
    port_.drain([this](const Cqe& entry) {
      const auto kind = tag_of(entry.tag).kind;
      expect(entry.sequence == port_.sequence(0), "the honest frontend got another's completion", entry.sequence);
      if (kind == CqeKind::kAdmitted) return;
      expect(kind == CqeKind::kToken && entry.token == next_token(tokens_), "a wrong token", uint64_t(kind));
      tokens_.push_back(entry.token);
      if ((entry.tag >> 16 & 0xff) == 0) return;
      expect(tokens_.size() == wanted_, "ended too early", tokens_.size());
      tokens_.clear();
      answered_++;
    });
  }

 private:
  Port port_;
  std::vector<int32_t> tokens_;
  size_t wanted_ = 0;
  uint32_t answered_ = 0;
};

// Why the scheduler must refuse an entry whatever its own state is; written from the contract, not from its code.
bool is_bad(const Geometry& g, const Sqe& e) {
  const auto outside = [&](uint64_t offset, uint64_t bytes) {
    return offset % 4 != 0 || offset + bytes > g.arena_bytes;
  };
  const auto beyond = [](float value, float low, float high) { return !(value >= low && value <= high); };
  const bool cancels = e.opcode == uint32_t(Opcode::kCancel);
  if (e.opcode == uint32_t(Opcode::kResetPrefixCache) || e.opcode == uint32_t(Opcode::kResume)) return false;
  if (e.opcode == uint32_t(Opcode::kPause)) return e.pause_mode < 1 || e.pause_mode > 4 || e.pause_drop > 1;
  if (e.opcode != uint32_t(Opcode::kSubmit) && !cancels) return true;
  if ((e.sequence & 0xffffffff) >= g.sequences_per_queue_pair) return true;
  if (cancels) return false;
  const bool bad_sizes = e.num_prompt_tokens < 1 || e.num_prompt_tokens >= g.max_model_len || e.num_stop_tokens > 128 ||
                         e.num_biases > 1024 || e.num_hashes > e.num_prompt_tokens / g.block_size;
  const bool bad_places = outside(e.prompt_offset, 4ull * e.num_prompt_tokens) ||
                          (e.num_stop_tokens > 8 && outside(e.more_stop_offset, 4ull * (e.num_stop_tokens - 8))) ||
                          (e.num_biases > 0 && outside(e.bias_offset, 8ull * e.num_biases)) ||
                          (e.num_hashes > 0 && outside(e.hashes_offset, 16ull * e.num_hashes));
  const bool bad_values = beyond(e.sampling.temperature, 0, 100) || beyond(e.sampling.top_p, 0, 1) ||
                          e.sampling.top_p == 0 || beyond(e.sampling.min_p, 0, 1) ||
                          beyond(e.sampling.repetition_penalty, 0, 1e6f) || e.sampling.repetition_penalty == 0 ||
                          beyond(e.sampling.presence_penalty, -2, 2) || beyond(e.sampling.frequency_penalty, -2, 2) ||
                          e.sampling.top_k < -1 || e.sampling.num_logprobs < -1 || e.sampling.num_logprobs > 20 ||
                          e.sampling.num_prompt_logprobs > 21;
  const uint32_t named = e.sampling.named_logprobs;
  const bool bad_names = named > 0 && (named != uint32_t(e.sampling.num_logprobs) || named > e.num_biases);
  const bool bad_prediction =
      e.num_prediction_tokens > g.max_model_len ||
      (e.num_prediction_tokens > 0 && outside(e.prediction_offset, 4ull * e.num_prediction_tokens));
  const bool bad_adapter = e.adapter > 0;  // the rig has none: test_adapters.py
  const bool bad_target = e.tpot_target_us > kMaxTpotTargetUs && e.tpot_target_us != kNoTpotTarget;
  return bad_sizes || bad_places || bad_values || bad_names || bad_prediction || bad_target || bad_adapter ||
         e.max_tokens < 1 || e.sampling.min_tokens > e.max_tokens || e.service_class > 1 ||
         e.automaton_bytes > 0;  // the rig has no vocabulary: see siege.py and automata.cpp
}

// Sends what no frontend would.
class Hostile {
 public:
  Hostile(Rig& rig, const Honest& honest, uint32_t seed)
      : rig_(rig), honest_(honest), port_(rig, kHostile), random_(seed) {
    spoil_arena();
  }
  uint64_t sent = 0, bad = 0, refused = 0, ended = 0, biased = 0;

  bool is_attached() const { return port_.is_attached(); }
  void attach() {
    port_.request_attach();
    started_ = false;
  }
  // Do what comes to mind; leave the queue unread at times, for up to `longest` turns.
  void act(uint64_t longest) {
    port_.renew_lease();
    if (!port_.is_attached()) return;
    if (!started_) port_.start();
    started_ = true;
    if (deaf_turns_ == 0 && random_() % 1024 == 0) deaf_turns_ = 1 + random_() % longest;
    if (deaf_turns_ > 0)
      deaf_turns_--;
    else
      drain();
    if (random_() % 64 == 0) spoil_arena();
    while (port_.has_room() && random_() % 64 != 0) push();
  }
  void drain() {
    port_.renew_lease();
    port_.drain([this](const Cqe& entry) { count(entry); });
  }
  // Break the protocol of the frontend's words.
  void misbehave() {
    FrontendWords& words = port_.words();
    const uint64_t kind = random_() % 4;
    uint32_t& word = kind == 0 ? words.sq_tail : kind == 1 ? words.lease : words.cq_head;
    // The last kind of head is a jump by less than the queue holds: to entries that were not written, or read before.
    store_release(word, kind < 3 ? uint32_t(random_()) : word + uint32_t(random_() % 128) - 64);
  }

 private:
  uint32_t word() {
    static const uint32_t edges[] = {0,   1,   2,    7,    8,    15,   16,   63,         64,         65,        127,
                                     128, 129, 1024, 1025, 8188, 8192, 8193, 0x7fffffff, 0x80000000, 0xffffffff};
    const uint64_t kind = random_() % 4;
    return kind == 0 ? uint32_t(random_()) : kind == 1 ? uint32_t(random_() % 70) : edges[random_() % std::size(edges)];
  }

  void push() {
    Sqe e = plain_request((random_() % 4) << 32 | random_() % kTags, uint32_t(1 + random_() % 6));
    e.service_class = random_() % 2;
    e.prompt_offset = uint32_t(random_() % 1024) * 4;
    e.num_prompt_tokens = uint32_t(1 + random_() % 60);
    e.num_hashes = random_() % 2 == 0 ? e.num_prompt_tokens / kBlockSize : 0;
    e.hashes_offset = uint32_t(random_() % 512) * 4;
    if (random_() % 4 == 0) use_forgery(e);
    if (random_() % 4 == 0) use_biases(e);
    if (random_() % 2 == 0) e.hash_root[random_() % kBlockHashBytes] = uint8_t(random_());  // the answer is cached too
    if (random_() % 8 == 0) e.opcode = uint32_t(Opcode::kCancel);
    if (random_() % 64 == 0) e.opcode = uint32_t(Opcode::kResetPrefixCache);
    Word* words = reinterpret_cast<Word*>(&e);
    if (random_() % 8 == 0) {
      for (uint32_t i = 0; i < sizeof e / 4; i++) words[i] = uint32_t(random_());
      if (random_() % 2 == 0) e.opcode = uint32_t(Opcode::kSubmit);
    } else if (random_() % 2 == 0) {
      for (uint64_t n = 1 + random_() % 3; n > 0; n--) words[random_() % (offsetof(Sqe, reserved) / 4)] = word();
    }
    bad += is_bad(rig_.geometry(), e);
    sent++;
    port_.push(e);
  }

  // Send a prompt like the honest frontend's, with some tokens changed, under its hashes.
  void use_forgery(Sqe& e) {
    std::vector<int32_t> prompt = honest_prompt(honest_.answered() + uint32_t(random_() % 3));
    const std::vector<Hash> hashes = block_hashes(prompt);
    for (uint64_t n = random_() % 3; n > 0; n--) prompt[random_() % prompt.size()] = int32_t(random_() % kVocab);
    std::memcpy(port_.arena() + kForgery, prompt.data(), prompt.size() * 4);
    if (!hashes.empty()) std::memcpy(port_.arena() + kForgery + 256, hashes.data(), hashes.size() * sizeof(Hash));
    e.prompt_offset = kForgery;
    e.hashes_offset = kForgery + 256 + (random_() % 4 == 0 ? sizeof(Hash) : 0);  // or each under the next one's
    e.num_prompt_tokens = uint32_t(prompt.size());
    e.num_hashes = uint32_t(hashes.size());
  }

  // Biases that are sound, and at times one that is not.
  void use_biases(Sqe& e) {
    static const float edges[] = {100.0f, -100.0f, 0.0f, 1e-45f, 100.00001f, -1e38f, INFINITY, -INFINITY, NAN, -NAN};
    e.num_biases = uint32_t(1 + random_() % 16);
    e.bias_offset = kBiases;
    auto* tokens = reinterpret_cast<int32_t*>(port_.arena() + kBiases);
    auto* values = reinterpret_cast<float*>(tokens + e.num_biases);
    for (uint32_t i = 0; i < e.num_biases; i++) tokens[i] = int32_t(random_() % kVocab);
    for (uint32_t i = 0; i < e.num_biases; i++) values[i] = float(random_() % 200) - 100;
    if (random_() % 4 == 0) values[random_() % e.num_biases] = edges[random_() % std::size(edges)];
  }

  // Mostly tokens; sometimes anything, floats that are no numbers too. Repeated words make equal hashes of different
  // blocks.
  void spoil_arena() {
    Word* words = reinterpret_cast<Word*>(port_.arena());
    for (uint32_t i = 0; i < rig_.geometry().arena_bytes / 4; i++) {
      const uint64_t kind = random_() % 1024;
      words[i] = kind == 0             ? uint32_t(random_())
                 : kind == 1           ? 0x7f800000u | (word() & 0x80400000u)
                 : kind < 700 && i > 4 ? words[i - 4]
                                       : uint32_t(random_() % kVocab);
    }
  }

  void count(const Cqe& entry) {
    const auto kind = tag_of(entry.tag).kind;
    const auto code = RejectCode(entry.token);
    if (kind == CqeKind::kRejected) {
      const bool depends_on_state = code == RejectCode::kTagBusy || code == RejectCode::kUnknownSequence;
      const bool of_arena = code == RejectCode::kPromptToken || code == RejectCode::kBiasValue;
      biased += code == RejectCode::kBiasValue;
      ended += of_arena;
      refused += !depends_on_state && !of_arena;
    } else {
      ended += tag_of(entry.tag).finish_reason != FinishReason::kNone;
    }
  }

  static constexpr uint32_t kBiases = 6656, kForgery = 7168;  // places in the arena

  Rig& rig_;
  const Honest& honest_;
  Port port_;
  std::mt19937_64 random_;
  uint64_t deaf_turns_ = 0;
  bool started_ = false;
};

class Fuzz {
 public:
  explicit Fuzz(uint32_t seed) : rig_(3), honest_(rig_), hostile_(rig_, honest_, seed), random_(seed) {
    rig_.state().geometry.stall_timeout_ns = kStallTurns * kTurnNs;
    rig_.cut_steps(seed % 2 == 1 ? 3 : 0);
    honest_.port().request_attach();
    hostile_.attach();
    pass();
    honest_.port().start();
  }

  // Bad and good entries through sound words: each bad one is refused, each good one comes to its end.
  void send_entries(uint64_t count) {
    while (hostile_.sent < count) turn([this] { hostile_.act(kStallTurns / 2); });
    for (uint32_t n = 0; rig_.state().num_live > 0 || hostile_.refused < hostile_.bad || honest_.is_unread(); n++) {
      expect(n < 20000, "something accepted does not come to its end", rig_.state().num_live);
      turn([this] { hostile_.drain(); });
    }
    hostile_.drain();
    expect(hostile_.refused == hostile_.bad, "bad entries and refusals differ", hostile_.refused);
    expect(hostile_.ended + honest_.submitted() == rig_.state().next_arrival, "an accepted request did not end",
           hostile_.ended);
  }

  // Random words as well, and owners that come and go.
  void break_words(uint64_t count) {
    for (uint64_t until = hostile_.sent + count; hostile_.sent < until;) {
      turn([this] { hostile_.act(kStallTurns * 2); });
      if (random_() % 300 == 0) hostile_.misbehave();
      if (random_() % (hostile_.is_attached() ? 3000 : 150) == 0) hostile_.attach();
    }
    // A new and honest owner of the hostile queue pair finds it usable.
    hostile_.attach();
    const uint32_t before = honest_.answered();
    for (uint32_t n = 0; n < 500; n++) turn([] {});
    expect(honest_.answered() > before + 10, "the honest frontend starves", honest_.answered());
    expect(
        load_acquire(scheduler_words(rig_.state(), kHostile).attached) == frontend_words(rig_.state(), kHostile).attach,
        "the queue pair has no owner again", 0);
  }

  void report() const {
    std::printf(
        "sent %llu bad %llu refused %llu ended %llu biased %llu honest answers %u expired %llu steps %llu "
        "launches %llu preempted %llu hits %llu\n",
        ull(hostile_.sent), ull(hostile_.bad), ull(hostile_.refused), ull(hostile_.ended), ull(hostile_.biased),
        honest_.answered(), ull(statistics().expired_leases), ull(statistics().num_steps), ull(rig_.state().step),
        ull(statistics().num_preemptions), ull(statistics().prefix_hits));
  }

 private:
  static unsigned long long ull(uint64_t value) { return value; }
  const Statistics& statistics() const { return rig_.state().statistics; }

  template <class Act>
  void turn(Act act) {
    honest_.act();
    remember();
    act();
    pass();
  }

  void pass() {
    SoloEnv env{now_ += kTurnNs};
    const StepResult result = step(env, rig_.state());
    expect(result != StepResult::kFailed, "the scheduler failed", rig_.state().control->error_place);
    in_flight_ = in_flight_ || result == StepResult::kLaunched;
    if (in_flight_ && random_() % 4 != 0) {
      rig_.compute();
      in_flight_ = false;
    }
    if (passes_++ % 32 != 0) return;
    const char* broken = check_integrity(rig_.state());
    expect(broken == nullptr, broken, passes_);
    compare();
  }

  // What only the honest frontend writes, and all of a queue pair that nobody owns.
  std::vector<uint8_t> guarded() const {
    const State& s = rig_.state();
    const uint8_t* base = queue_pair_base(s, kHonest);
    std::vector<uint8_t> bytes(base, base + s.queue_pair.scheduler_words);
    bytes.insert(bytes.end(), base + s.queue_pair.sq, base + s.queue_pair.cq);
    bytes.insert(bytes.end(), base + s.queue_pair.arena, base + s.queue_pair.arena + s.geometry.arena_bytes);
    const uint8_t* idle = queue_pair_base(s, kIdle);
    bytes.insert(bytes.end(), idle, idle + s.queue_pair.bytes);
    return bytes;
  }
  void remember() {
    if (passes_ % 32 == 0) shadow_ = guarded();
  }
  void compare() const {
    expect(shadow_.empty() || shadow_ == guarded(), "another queue pair's memory changed", passes_);
  }

  Rig rig_;
  Honest honest_;
  Hostile hostile_;
  std::mt19937_64 random_;
  std::vector<uint8_t> shadow_;
  uint64_t now_ = 1'000'000'000, passes_ = 0;
  bool in_flight_ = false;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const uint64_t entries = std::strtoull(argv[1], nullptr, 10);
  Fuzz fuzz(uint32_t(std::atoi(argv[2])));
  fuzz.send_entries(entries / 2);
  fuzz.break_words(entries - entries / 2);
  fuzz.report();
}
