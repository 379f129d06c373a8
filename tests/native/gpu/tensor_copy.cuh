// SPDX-License-Identifier: Apache-2.0
// csrc/gpu/decode/tensor_copy.cuh for emulated threads: of tensors those that attention copies.
#pragma once

#include "ptx.cuh"

namespace blink {

struct CellTensor {  // the KV cache of a layer in 16 bits
  const Bf16* cells;
  long token, values;  // elements from one token to the next, and from keys to values
  int head_dim;
};

struct alignas(64) TensorMap {
  union {
    unsigned long long words[16];
    CellTensor cells;
  };
};

constexpr int kBoxRow = 64, kBoxTokens = 16;

inline void prefetch_map(const TensorMap&) {}
inline unsigned long long read_once_policy() { return 0; }
inline unsigned long long read_often_policy() { return 0; }

inline void copy_box_5d(void* to, const TensorMap& map, int token, int head, Barrier& barrier, unsigned long long) {
  const CellTensor& tensor = map.cells;
  if (uintptr_t(to) % 1024) emulated::fail("a box that is not aligned");
  const int parts = tensor.head_dim / kBoxRow;
  char* row = static_cast<char*>(to);
  for (int kind = 0; kind < 2; kind++)
    for (int part = 0; part < parts; part++)
      for (int i = 0; i < kBoxTokens; i++, row += kBoxRow * 2) {
        const Bf16* from =
            tensor.cells + kind * tensor.values + (token + i) * tensor.token + head * tensor.head_dim + part * kBoxRow;
        for (int chunk = 0; chunk < 8; chunk++) std::memcpy(row + (chunk ^ i % 8) * 16, from + chunk * 8, 16);
      }
  complete(barrier, 2 * parts * kBoxTokens * kBoxRow * 2);
}

}  // namespace blink
