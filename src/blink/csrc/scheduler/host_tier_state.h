// SPDX-License-Identifier: Apache-2.0
// What the scheduler keeps of blocks in host memory (host_tier.h, host_restore.h).
#pragma once

#include "region/layout.h"

namespace blink {

// A block of the prefix cache as it was registered once: no other content ever has both numbers.
struct Registration {
  FIELDS_OF(Registration);
  FIELD(uint32_t, block);  // kNone: before the first block of a prompt
  FIELD(uint32_t, count);  // of this block's registrations; before the first block: SlotParams::content
};
BLINK_FN bool operator==(Registration a, Registration b) { return a.block == b.block && a.count == b.count; }

struct Hash {
  uint64_t low, high;
};
static_assert(sizeof(Hash) == kBlockHashBytes);
BLINK_FN bool operator==(Hash a, Hash b) { return a.low == b.low && a.high == b.high; }

// How a host block stands. A hot one is passed over once when one is taken for another block, a pinned one always.
enum class HostMark : uint32_t { kEmpty = 0, kCold = 1, kHot = 2, kPinned = 3 };

// What whoever runs a launch copies before its first layer: one block, in the order of the list.
struct HostCopy {
  FIELDS_OF(HostCopy);
  FIELD(uint32_t, block);
  FIELD(uint32_t, host_block);
  FIELD(uint32_t, to_host);  // 0: to the block
};

struct HostTier {
  FIELDS_OF(HostTier);
  STATE_ARRAY(uint32_t, table, g.host_hash_entries);  // host block + 1; 0 = empty
  STATE_ARRAY(Hash, hashes, g.num_host_blocks);
  STATE_ARRAY(HostMark, marks, g.num_host_blocks);
  STATE_ARRAY(Registration, ids, g.num_host_blocks);      // of the block whose copy it is
  STATE_ARRAY(Registration, parents, g.num_host_blocks);  // likewise: State::block_parents
  STATE_ARRAY(int32_t, tokens, uint64_t(g.num_host_blocks) * g.block_size);
  STATE_ARRAY(HostCopy, copies, g.host_copies);  // a ring
  // First and end of those of the launch in flight, which reads them: a GPU's scheduler has its other fields elsewhere.
  STATE_ARRAY(uint32_t, copy_bounds, 2);
  STATE_ARRAY(uint32_t, found, g.num_host_blocks == 0 ? 0 : g.max_blocks);  // blocks that one restoration finds
  FIELD(uint32_t, hand);  // the host block that is looked at next to be taken
  FIELD(uint32_t, copies_tail);
  FIELD(uint32_t, copies_kept);  // places of the ring that are left to a restoration
};

}  // namespace blink
