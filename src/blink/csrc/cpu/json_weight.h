// SPDX-License-Identifier: Apache-2.0
// How much a JSON text holds, before it becomes objects of Python, which are many times larger.
#pragma once

#include <cstdint>
#include <cstring>

namespace blink {

struct JsonWeight {
  uint64_t containers;  // arrays and objects
  uint64_t items;       // their members, at most one too few for each container
  uint64_t text_bytes;  // of all strings, as they are written, and some for each to be one
};
constexpr uint64_t kStringBytes = 16;

// Count what stands outside of strings, and how long they are. The text may be malformed: the parser says so later.
inline JsonWeight weigh_json(const char* text, uint64_t bytes) {
  JsonWeight weight{};
  const char* const end = text + bytes;
  for (const char* at = text; at < end; at++) {
    if (*at == '"') {
      const char* const start = ++at;
      for (; at < end && *at != '"'; at++) at += *at == '\\';
      weight.text_bytes += kStringBytes + uint64_t((at < end ? at : end) - start);
    } else if (*at == '[' || *at == '{') {
      weight.containers++;
    } else if (*at == ',') {
      weight.items++;
    }
  }
  return weight;
}

}  // namespace blink
