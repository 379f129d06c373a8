// SPDX-License-Identifier: Apache-2.0
// The chained hash of a block: SipHash-2-4 with 128 bits (Aumasson and Bernstein, 2012) over the hash before it and its
// tokens. Frontends hash prompts, the scheduler goes on with answers; without the key nobody can make two that collide.
#pragma once

#include "scheduler/state.h"

namespace blink {

BLINK_FN Hash hash_of_bytes(const uint8_t* bytes) {
  Hash hash{0, 0};
  for (uint32_t i = 0; i < 8; i++) {
    hash.low |= uint64_t(bytes[i]) << (8 * i);
    hash.high |= uint64_t(bytes[8 + i]) << (8 * i);
  }
  return hash;
}

class SipHash {
 public:
  BLINK_FN explicit SipHash(Hash key)
      : v0_(key.low ^ 0x736f6d6570736575ull),
        v1_(key.high ^ 0x646f72616e646f6dull ^ 0xee),
        v2_(key.low ^ 0x6c7967656e657261ull),
        v3_(key.high ^ 0x7465646279746573ull) {}

  BLINK_FN void add(uint64_t word) {
    v3_ ^= word;
    mix(2);
    v0_ ^= word;
    bytes_ += 8;
  }

  BLINK_FN Hash finish() {
    add(uint64_t(bytes_) << 56);
    v2_ ^= 0xee;
    mix(4);
    const uint64_t low = v0_ ^ v1_ ^ v2_ ^ v3_;
    v1_ ^= 0xdd;
    mix(4);
    return {low, v0_ ^ v1_ ^ v2_ ^ v3_};
  }

 private:
  BLINK_FN static uint64_t rotate(uint64_t x, uint32_t bits) { return x << bits | x >> (64 - bits); }

  BLINK_FN void mix(uint32_t rounds) {
    for (uint32_t i = 0; i < rounds; i++) {
      v0_ += v1_;
      v2_ += v3_;
      v1_ = rotate(v1_, 13) ^ v0_;
      v3_ = rotate(v3_, 16) ^ v2_;
      v0_ = rotate(v0_, 32) + v3_;
      v2_ += v1_;
      v3_ = rotate(v3_, 21) ^ v0_;
      v1_ = rotate(v1_, 17) ^ v2_;
      v2_ = rotate(v2_, 32);
    }
  }

  uint64_t v0_, v1_, v2_, v3_;
  uint32_t bytes_ = 0;
};

// Hash `count` tokens, an even number, behind a block whose hash is `before`.
BLINK_RARE_FN Hash hash_block(Hash key, Hash before, const int32_t* tokens, uint32_t count) {
  SipHash hash(key);
  hash.add(before.low);
  hash.add(before.high);
  for (uint32_t i = 0; i < count; i += 2) hash.add(uint32_t(tokens[i]) | uint64_t(uint32_t(tokens[i + 1])) << 32);
  return hash.finish();
}

}  // namespace blink
