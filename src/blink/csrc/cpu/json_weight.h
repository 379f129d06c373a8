// SPDX-License-Identifier: Apache-2.0
// How much a JSON text holds, before it becomes objects of Python, which are many times larger.
#pragma once

#include <cstring>

#include "region/fields.h"

namespace blink {

struct JsonWeight {
  FIELDS_OF(JsonWeight);
  FIELD(uint64_t, containers);  // arrays and objects
  FIELD(uint64_t, items);       // their members, at most one too few for each container
  FIELD(uint64_t, text_bytes);  // of all strings, as they are written, and some for each to be one
  FIELD(uint64_t, depth);       // containers around the innermost one, itself included
  FIELD(uint64_t, name_begin);  // of the outermost object's member that is so deep, within its quotes
  FIELD(uint64_t, name_bytes);
};
constexpr uint64_t kStringBytes = 16;

// Count what stands outside of strings, and how long they are. The text may be malformed: the parser says so later.
inline JsonWeight weigh_json(const char* text, uint64_t bytes) {
  JsonWeight weight{};
  const char* const end = text + bytes;
  uint64_t depth = 0, name_begin = 0, name_bytes = 0;
  for (const char* at = text; at < end; at++) {
    if (*at == '"') {
      const char* const start = ++at;
      for (; at < end && *at != '"'; at++) at += *at == '\\';
      const uint64_t length = uint64_t((at < end ? at : end) - start);
      weight.text_bytes += kStringBytes + length;
      if (depth == 1) name_begin = uint64_t(start - text), name_bytes = length;
    } else if (*at == '[' || *at == '{') {
      weight.containers++;
      if (++depth > weight.depth) {
        weight.depth = depth;
        weight.name_begin = name_begin;
        weight.name_bytes = name_bytes;
      }
    } else if (*at == ']' || *at == '}') {
      depth -= depth > 0;
    } else if (*at == ',') {
      weight.items++;
    }
  }
  return weight;
}

}  // namespace blink
