// SPDX-License-Identifier: Apache-2.0
// Finds tokens by their bytes: a hash table that the engine fills before the scheduler starts.
//
// Only hashes are compared. Tokens that are found become drafts, so a wrong one costs a row at most.
#pragma once

#include "automaton/walk.h"
#include "scheduler/state.h"

namespace blink {

constexpr uint32_t kMostTokenBytes = 16;  // of a token that the table has
constexpr uint32_t kTokenProbes = 4;      // entries that may hold a token

BLINK_FN uint32_t token_entry(uint32_t entries, uint32_t hash, uint32_t probe) {
  return ((hash ^ hash >> 15) + probe) & (entries - 1);
}

// A number of bytes that are a token, the longest that a text begins with.
struct FoundToken {
  int32_t token;
  uint32_t length;  // 0: there is none
};
BLINK_RARE_FN FoundToken find_token(const State& s, const uint8_t* text, uint32_t length) {
  FoundToken found{0, 0};
  uint32_t hash = kItemSeed;
  for (uint32_t i = 0; i < length; i++) {
    hash = hash_on(hash, text[i]);
    for (uint32_t probe = 0; probe < kTokenProbes; probe++) {
      const TokenEntry entry = s.token_index[token_entry(s.geometry.token_entries, hash, probe)];
      if (entry.token > 0 && entry.hash == hash) found = {int32_t(entry.token - 1), i + 1};
    }
  }
  return found;
}

// Fill an empty table, of a power of two or no entries. Of equal texts the last token counts: tokens of single bytes
// come before those of texts.
BLINK_FN void index_tokens(const uint32_t* starts, const uint8_t* text, uint32_t vocab_size, uint32_t entries,
                           TokenEntry* index) {
  for (uint32_t token = 0; token < vocab_size && entries > 0; token++) {
    const uint32_t length = starts[token + 1] - starts[token];
    if (length == 0 || length > kMostTokenBytes) continue;
    uint32_t hash = kItemSeed;
    for (uint32_t at = starts[token]; at < starts[token + 1]; at++) hash = hash_on(hash, text[at]);
    for (uint32_t probe = 0; probe < kTokenProbes; probe++) {
      TokenEntry& entry = index[token_entry(entries, hash, probe)];
      if (entry.token > 0 && entry.hash != hash) continue;
      entry = {hash, token + 1};
      break;
    }
  }
}

}  // namespace blink
