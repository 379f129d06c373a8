// SPDX-License-Identifier: Apache-2.0
// csrc/sampler by groups of many lanes behind a C API. Lanes are contexts of one thread, which take turns at barriers.
#include <setjmp.h>
#include <ucontext.h>

#include "cpu/sampler.h"

using namespace blink;

namespace {

struct Barrier {
  uint32_t waiting = 0;
  uint64_t generation = 0;
};

class Lanes {
 public:
  explicit Lanes(uint32_t count)
      : contexts_(count), stacks_(new char[count * kStackBytes]), places_(new jmp_buf[count]) {}

  // Run work(lane) on every lane, to the end.
  template <class Work>
  void run(const Work& work) {
    call_ = [](const void* context, uint32_t lane) { (*static_cast<const Work*>(context))(lane); };
    context_ = &work;
    num_ended_ = 0, num_begun_ = 1;
    for (uint32_t lane = 0; lane < contexts_.size(); lane++) {
      getcontext(&contexts_[lane]);
      contexts_[lane].uc_stack.ss_sp = stacks_.get() + lane * kStackBytes;
      contexts_[lane].uc_stack.ss_size = kStackBytes;
      contexts_[lane].uc_link = nullptr;
      makecontext(&contexts_[lane], &begin, 0);
    }
    running_ = this;
    current_ = 0;
    swapcontext(&home_, &contexts_[0]);
  }

  uint32_t current() const { return current_; }

  void wait(Barrier& barrier, uint32_t size) {
    const uint64_t generation = barrier.generation;
    if (++barrier.waiting == size)
      barrier.waiting = 0, barrier.generation++;
    else
      while (barrier.generation == generation) yield();
  }

 private:
  static constexpr size_t kStackBytes = 32 << 10;

  static void begin() {
    Lanes& lanes = *running_;
    lanes.call_(lanes.context_, lanes.current_);
    if (++lanes.num_ended_ == lanes.contexts_.size()) setcontext(&lanes.home_);
    for (;;) lanes.yield();
  }

  void yield() {
    const uint32_t from = current_;
    current_ = (current_ + 1) % uint32_t(contexts_.size());
    if (current_ == from || _setjmp(places_[from]) != 0) return;  // without a system call, as swapcontext() has
    if (current_ < num_begun_) _longjmp(places_[current_], 1);
    num_begun_++;
    setcontext(&contexts_[current_]);
  }

  inline static Lanes* running_ = nullptr;
  std::vector<ucontext_t> contexts_;
  std::unique_ptr<char[]> stacks_;
  ucontext_t home_;
  void (*call_)(const void*, uint32_t) = nullptr;
  const void* context_ = nullptr;
  uint32_t current_ = 0;
  std::unique_ptr<jmp_buf[]> places_;
  size_t num_ended_ = 0, num_begun_ = 0;
};

// Blocks of threads, with the CPU's numbers.
template <int kNumBlocks, int kNumThreads>
struct LaneGroup : SoloGroup {
  static constexpr int kBlocks = kNumBlocks, kThreads = kNumThreads, kSize = kBlocks * kThreads, kWarp = 32;
  static constexpr int kLoads = kBlocks == 1 ? 4 : 1;  // as on a GPU

  // What the lanes share.
  struct Team {
    struct Block {
      RowShared<LaneGroup> shared;
      Best best;
      Changes changes;
    };
    Lanes lanes{kSize};
    Barrier all, of_block[kBlocks];
    Block blocks[kBlocks];
    uint64_t values[kSize];
  };
  Team* team;
  uint32_t lane;

  uint32_t thread() const { return lane % kThreads; }
  uint32_t block() const { return lane / kThreads; }
  void sync() const { team->lanes.wait(team->of_block[block()], kThreads); }
  void wait() const { team->lanes.wait(team->all, kSize); }
  void meet() const { wait(); }

  template <class T>
  T from(T value, uint32_t other) const {
    team->values[lane] = 0;
    std::memcpy(&team->values[lane], &value, sizeof(T));
    sync();
    std::memcpy(&value, &team->values[other], sizeof(T));
    sync();
    return value;
  }
  template <class T>
  T from_lane_xor(T value, int mask) const {
    return from(value, lane ^ uint32_t(mask));
  }
  template <class T>
  T from_lane_before(T value, int step) const {
    return from(value, lane % kWarp >= uint32_t(step) ? lane - uint32_t(step) : lane);
  }

  // The same word of another block.
  template <class T>
  T& word_in(uint32_t other, T& word) const {
    const auto offset = reinterpret_cast<char*>(&word) - reinterpret_cast<char*>(&team->blocks[block()]);
    return *reinterpret_cast<T*>(reinterpret_cast<char*>(&team->blocks[other]) + offset);
  }
  template <class T>
  void tell(uint32_t other, T& word, T value) const {
    word_in(other, word) = value;
  }
  template <class T>
  T add_in(uint32_t other, T& word, T value) const {
    return add(word_in(other, word), value);
  }
  void lower_in(uint32_t other, uint32_t& word, uint32_t value) const { lower(word_in(other, word), value); }
};

// Changed as a GPU does it: each logit when it is read.
struct LanePart : FloatPart {
  using FloatPart::FloatPart;
  ChangedPart<LanePart> with(const Changes* changes) const { return {*this, changes}; }
};

template <class Group>
void sample_by(const SampledRows& rows) {
  static const auto team = std::make_unique<typename Group::Team>();
  RowMemory memory;
  for (uint32_t index = 0; index < rows.num_rows; index++)
    with_row(rows, index, Group::kBlocks, memory,
             [&](const SourceRow& from, const SampledRow& row, const RowSlot& slot) {
               team->lanes.run([&](uint32_t lane) {
                 Group group;
                 group.team = team.get(), group.lane = lane;
                 auto& block = team->blocks[group.block()];
                 const LanePart part(group, from.logits, from.vocab_size);
                 ChangeWord* words = from.memory.words.data() + group.block() * change_words((from.vocab_size + 3) / 4);
                 const ChangeMemory changes{block.changes, words, from.memory.values.data()};
                 sample_row(group, block.shared, block.best, part, changes, row, slot);
               });
             });
}

}  // namespace

extern "C" void sample_by_lanes(const SampledRows* rows, uint32_t blocks, uint32_t lanes) {
  if (blocks == 1 && lanes == 32) return sample_by<LaneGroup<1, 32>>(*rows);
  if (blocks == 1 && lanes == 1024) return sample_by<LaneGroup<1, 1024>>(*rows);
  if (blocks == 8 && lanes == 1024) return sample_by<LaneGroup<8, 128>>(*rows);
  std::abort();
}
