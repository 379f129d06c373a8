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

// One block that is to be copied.
struct HostCopy {
  FIELDS_OF(HostCopy);
  FIELD(uint32_t, block);
  FIELD(uint32_t, host_block);
  FIELD(uint32_t, to_host);  // 0: to the block
};

// The copies that are to be made, in their order: before the first layer of the launch in flight, or while steps run.
struct HostOrder {
  FIELDS_OF(HostOrder);
  FIELD(uint32_t, begin);  // in the ring of copies
  FIELD(uint32_t, end);
  FIELD(uint32_t, ordered);  // orders so far, of copies while steps run
  FIELD(uint32_t, done);     // of these; writer: who copies, with release
};

constexpr uint32_t kBlocksOfOrder = 32;  // of the KV cache: 64 MiB of an 8B model, less than a step's time

struct HostTier {
  FIELDS_OF(HostTier);
  STATE_ARRAY(uint32_t, table, g.host_hash_entries);  // host block + 1; 0 = empty
  STATE_ARRAY(Hash, hashes, g.num_host_blocks);
  STATE_ARRAY(HostMark, marks, g.num_host_blocks);
  STATE_ARRAY(Registration, ids, g.num_host_blocks);      // of the block whose copy it is
  STATE_ARRAY(Registration, parents, g.num_host_blocks);  // likewise: State::block_parents
  STATE_ARRAY(int32_t, tokens, uint64_t(g.num_host_blocks) * g.block_size);
  STATE_ARRAY(HostCopy, copies, g.host_copies);  // a ring
  STATE_ARRAY(HostOrder, order, 1);  // who copies reads it: a GPU's scheduler has its other fields elsewhere
  STATE_ARRAY(uint32_t, found, g.num_host_blocks == 0 ? 0 : g.max_blocks);      // blocks that one restoration finds
  STATE_ARRAY(uint32_t, ordered_blocks, g.copies_beside ? kBlocksOfOrder : 0);  // which the order in flight holds
  FIELD(uint32_t, hand);  // the host block that is looked at next to be taken
  FIELD(uint32_t, copies_tail);
  FIELD(uint32_t, copies_kept);  // places of the ring that are left to a restoration
  // Of copies while steps run:
  FIELD(uint32_t, num_ordered);       // of ordered_blocks; 0: no order is in flight
  FIELD(uint32_t, is_void);           // the order in flight is of a cache that was emptied meanwhile
  FIELD(uint32_t, wanted);            // index + 1 of the sequence that waits for an order; 0: none does
  FIELD(uint32_t, restored);          // likewise: for which the order in flight is; 0: it stores blocks
  FIELD(uint32_t, restored_from);     // blocks that this sequence had then
  FIELD(uint64_t, restored_arrival);  // its Sequence::arrival
  FIELD(uint32_t, looked_until);      // place in the LRU queue before which all blocks were looked at, to be stored
};

}  // namespace blink
