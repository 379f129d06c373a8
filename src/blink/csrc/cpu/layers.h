// SPDX-License-Identifier: Apache-2.0
// Layers of steps whose tokens attend one by one, one after the other in one call. Between two operations that Python
// calls, more time goes by than most of them take with few rows.
#pragma once

#include <vector>

#include "cpu/attention.h"
#include "cpu/gate.h"
#include "cpu/gguf/int16.h"
#include "cpu/gguf/product.h"
#include "cpu/kernels.h"
#include "cpu/layer_args.h"

namespace blink {

class DenseLayers {
 public:
  DenseLayers(const DenseStep& step, ThreadPool& pool) : step_(step), pool_(pool) {}

  // Add all layers to the residual, but for the update of the last one.
  void run(const DenseLayer* layers, uint32_t count) {
    normed_.resize(uint64_t(step_.rows) * step_.hidden);
    float* pending = nullptr;
    for (const DenseLayer* layer = layers; layer < layers + count; ++layer) {
      attend(*layer, read(layer->attention_norm, pending));
      mix(*layer, read(layer->mlp_norm, step_.update));
      pending = step_.update;
    }
  }

 private:
  const float* read(const float* norm, const float* pending) {
    const float* x = pending == nullptr ? step_.residual : pending;
    rms_norm(normed_.data(), x, pending == nullptr ? nullptr : step_.residual, norm, step_.rows, step_.hidden,
             step_.eps);
    return normed_.data();
  }

  void multiply(const GgufWeight& weight, const float* x, float* out) {
    if (step_.rounds != 0)
      multiply_int16(find_int16_kernel(Int16Isa::kBest), weight, x, step_.rows, out, pool_);
    else
      blink::multiply(*find_gguf_kernels(Isa::kBest), weight, x, step_.rows, out, pool_);
  }

  void attend(const DenseLayer& layer, const float* x) {
    const uint64_t columns = count_rows(*layer.qkv);
    qkv_.resize(step_.rows * columns);
    attended_.resize(uint64_t(step_.rows) * layer.heads * layer.head_dim);
    multiply(*layer.qkv, x, qkv_.data());
    if (layer.qkv_bias != nullptr)
      for (float* row = qkv_.data(); row < qkv_.data() + qkv_.size(); row += columns)
        for (uint64_t i = 0; i < columns; ++i) row[i] += layer.qkv_bias[i];
    with_cells(step_.is_half, [&]<class Cell>(Cell) { attend_cells<Cell>(layer, columns); });
    multiply(*layer.output, attended_.data(), step_.update);
  }

  template <class Cell>
  void attend_cells(const DenseLayer& layer, uint64_t columns) {
    const KeyGroup& group = step_.groups[layer.group];
    auto* keys = static_cast<Cell*>(layer.cells);
    Cell* values = keys + layer.cache_rows * layer.kv_heads * layer.head_dim;
    rotate_and_store(qkv_.data(), step_.rotations[layer.rotation], group.slots, keys, values,
                     {step_.rows, layer.heads, layer.kv_heads, layer.head_dim, step_.rotary_dim},
                     {layer.query_norm, layer.key_norm, layer.head_eps});
    const RowAttention<Cell> attention{qkv_.data(),
                                       columns,
                                       keys,
                                       layer.cache_rows,
                                       group.blocks,
                                       group.positions,
                                       layer.sinks,
                                       attended_.data(),
                                       step_.rows,
                                       uint32_t(group.row_blocks),
                                       step_.block_size,
                                       layer.kv_heads,
                                       layer.heads / layer.kv_heads,
                                       layer.head_dim,
                                       layer.window,
                                       layer.scale,
                                       layer.softcap};
    attend_rows(attention, pool_);
  }

  void mix(const DenseLayer& layer, const float* x) {
    const uint64_t size = layer.down->columns;
    gate_up_.resize(step_.rows * 2 * size);
    inner_.resize(step_.rows * size);
    multiply(*layer.gate_up, x, gate_up_.data());
    gate_rows(gate_up_.data(), step_.rows, uint32_t(size), inner_.data(), pool_);
    multiply(*layer.down, inner_.data(), step_.update);
  }

  const DenseStep& step_;
  ThreadPool& pool_;
  std::vector<float> normed_, qkv_, attended_, gate_up_, inner_;
};

}  // namespace blink
