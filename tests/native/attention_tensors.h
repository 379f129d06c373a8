// SPDX-License-Identifier: Apache-2.0
// What Python gives to attention's kernels on the host's threads: the addresses of tensors.
#pragma once

#include "kernels/args.h"

struct Tensors {
  const char *cache, *query;
  const int *block_tables, *items;
  int* counters;
  float *partials, *lses;
  char* out;
};

// The kernels' arguments, but for the map of the cache.
inline blink::PromptArgs make_arguments(const Tensors& tensors, int table_stride, float scale) {
  blink::PromptArgs args{};
  args.query = reinterpret_cast<const blink::Bf16*>(tensors.query);
  args.out = reinterpret_cast<blink::Bf16*>(tensors.out);
  args.block_tables = tensors.block_tables, args.table_stride = table_stride, args.items = tensors.items;
  args.counters = tensors.counters, args.partials = tensors.partials, args.lses = tensors.lses, args.scale = scale;
  return args;
}
