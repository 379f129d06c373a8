// SPDX-License-Identifier: Apache-2.0
// The scheduler on real threads: lanes, a model and frontends that submit, cancel and drain, all at once.
// Every sequence must deliver the tokens that the fake model gives for its prompt. Exit status 1 on any mismatch.
//
// threads LANES FRONTENDS SEQUENCES-PER-FRONTEND SEGMENTS: with more than one, best-effort steps are paused
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>

#include "rig.h"

using namespace blink;

namespace {

std::atomic<uint32_t> mismatches{0};

void expect(bool holds, const char* what, uint64_t detail) {
  if (holds) return;
  if (mismatches++ < 10) std::fprintf(stderr, "mismatch: %s (%llu)\n", what, static_cast<unsigned long long>(detail));
}

// A frontend that keeps up to kOpen sequences going until `total` have ended.
class Frontend {
 public:
  Frontend(Rig& rig, uint32_t qp, uint32_t total) : port_(rig, qp), total_(total), random_(qp + 1) {}

  void run() {
    port_.attach();
    while (ended_ < total_) {
      port_.renew_lease();
      if (submitted_ < total_ && live_.size() < kOpen && port_.has_room()) submit();
      if (random_() % 4 == 0) std::this_thread::yield();
      if (random_() % 16 != 0) port_.drain([this](const Cqe& entry) { observe(entry); });
    }
  }

 private:
  static constexpr size_t kOpen = 6;
  struct Live {
    std::vector<int32_t> tokens;
    uint32_t delivered, wanted, logprobs_read, logprobs;
    bool cancelled, admitted;
  };

  void submit() {
    const uint32_t tag = submitted_ % kTags;
    if (live_.count(tag)) return;
    std::vector<int32_t> prompt(1 + random_() % 40);
    for (size_t i = 0; i < prompt.size(); i++) prompt[i] = int32_t((i < 24 ? i * 3 + tag % 2 : random_()) % kVocab);
    Sqe e = plain_request(uint64_t(submitted_ + 1) << 32 | tag, uint32_t(1 + random_() % 12));
    e.service_class = random_() % 2;
    e.sampling.num_logprobs = random_() % 3 == 0 ? 2 : -1;
    e.sampling.num_prompt_logprobs = random_() % 4 == 0 ? 2 : 0;
    const uint32_t logprobs = e.sampling.num_prompt_logprobs > 0 ? uint32_t(prompt.size()) - 1 : 0;
    live_[tag] = Live{prompt, 0, e.max_tokens, 0, logprobs, false, false};
    port_.submit(e, prompt, tag);
    submitted_++;
    if (random_() % 16 == 0) cancel(tag);
  }

  void cancel(uint32_t tag) {
    if (live_[tag].cancelled || !port_.has_room()) return;
    live_[tag].cancelled = true;
    Sqe e{};
    e.opcode = uint32_t(Opcode::kCancel);
    e.sequence = port_.sequence(tag);
    port_.push(e);
  }

  void observe(const Cqe& entry) {
    const uint32_t tag = uint32_t(entry.sequence);
    const auto kind = tag_of(entry.tag).kind;
    const auto it = live_.find(tag);
    const bool known = it != live_.end() && port_.sequence(tag) == entry.sequence;
    if (kind == CqeKind::kRejected) {  // a cancellation that came too late
      expect(entry.token == int32_t(RejectCode::kUnknownSequence) && !known, "rejected", uint32_t(entry.token));
      return;
    }
    expect(known, "a completion of no sequence", entry.sequence);
    if (!known) return;
    Live& live = it->second;
    if (kind == CqeKind::kAdmitted) {
      expect(!live.admitted, "admitted twice", tag);
      live.admitted = true;
    } else if (kind == CqeKind::kPromptLogprob) {
      expect(entry.index == ++live.logprobs_read, "a prompt's logprob out of order", entry.index);
      expect(entry.token == live.tokens[entry.index], "the logprob of another token", uint32_t(entry.token));
    } else if (kind == CqeKind::kToken) {
      expect(live.admitted && entry.index == live.delivered, "a token out of order", entry.index);
      expect(live.logprobs_read == live.logprobs, "a token before the prompt's logprobs", live.logprobs_read);
      const int32_t token = next_token(live.tokens);
      expect(entry.token == token, "a wrong token", uint32_t(entry.token));
      live.tokens.push_back(token);
      live.delivered++;
    }
    const auto finish = tag_of(entry.tag).finish_reason;
    if (finish == FinishReason::kNone && random_() % 50 == 0) cancel(tag);
    if (finish == FinishReason::kNone) return;
    expect(finish == FinishReason::kAbort ? live.cancelled : live.delivered == live.wanted, "ended too early", tag);
    live_.erase(it);
    ended_++;
  }

  Port port_;
  uint32_t total_, submitted_ = 0, ended_ = 0;
  std::map<uint32_t, Live> live_;
  std::minstd_rand random_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const uint32_t lanes = uint32_t(std::atoi(argv[1])), frontends = uint32_t(std::atoi(argv[2]));
  Rig rig(frontends);
  rig.cut_steps(uint32_t(std::atoi(argv[4])));
  Lanes team(lanes);
  std::atomic<bool> over{false};
  std::thread model([&] {
    uint32_t computed = 0;
    while (!over) {
      if (team.num_launches() == computed) {
        std::this_thread::yield();
        continue;
      }
      rig.compute();
      computed++;
    }
  });
  std::thread scheduler([&] {
    for (uint64_t passes = 0; !over; passes++) {
      const StepResult result = team.step(rig.state(), 0);
      expect(result != StepResult::kFailed && result != StepResult::kStopped, "the scheduler ended", uint64_t(result));
      const char* broken = passes % 8 == 0 ? check_integrity(rig.state()) : nullptr;
      expect(broken == nullptr, broken, passes);
      if (mismatches > 0) std::exit(1);
    }
  });
  std::vector<std::thread> clients;
  for (uint32_t qp = 0; qp < frontends; qp++)
    clients.emplace_back([&, qp] { Frontend(rig, qp, uint32_t(std::atoi(argv[3]))).run(); });
  for (std::thread& client : clients) client.join();
  over = true;
  scheduler.join();
  model.join();
  const Statistics& t = rig.state().statistics;
  std::printf(
      "steps %llu launches %llu tokens %llu aborted %llu preempted %llu parked %llu evicted %llu hits %llu mismatches "
      "%u\n",
      static_cast<unsigned long long>(t.num_steps), static_cast<unsigned long long>(rig.state().step),
      static_cast<unsigned long long>(t.generation_tokens), static_cast<unsigned long long>(t.finished_abort),
      static_cast<unsigned long long>(t.num_preemptions), static_cast<unsigned long long>(t.num_parked),
      static_cast<unsigned long long>(t.evicted_blocks), static_cast<unsigned long long>(t.prefix_hits),
      mismatches.load());
  return mismatches != 0;
}
