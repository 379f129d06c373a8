// SPDX-License-Identifier: Apache-2.0
// GEMMs with weights in GGUF's blocks, every operand in memory of exactly its size: a sanitizer sees a read or write
// beyond. The instruction set is that which the program was compiled for.
#include <cstdio>
#include <memory>

#include "cpu/gguf/product.h"

#if defined(__AVX512F__)
#include "cpu/gguf/avx512.cpp"
#elif defined(__AVX2__)
#include "cpu/gguf/avx2.cpp"
#else
#include "cpu/gguf/plain.cpp"
#endif

using namespace blink;

namespace {

const GgufKernels* kernels() {
#if defined(__AVX512F__)
  return avx512_gguf_kernels();
#elif defined(__AVX2__)
  return avx2_gguf_kernels();
#else
  return plain_gguf_kernels();
#endif
}

uint32_t random_word() {
  static uint32_t state = 1;
  return (state = state * 1664525 + 1013904223) >> 8;
}

struct TwoParts {
  GgufWeight weight;
  GgufRows parts[2];
};

// Whether the product of 1s is the sum of each row's dequantised values.
bool is_right(GgufFormat format, uint64_t rows, uint32_t blocks, uint32_t x_rows, ThreadPool& pool) {
  const BlockSize size = block_size(format);
  const uint64_t columns = uint64_t(size.values) * blocks, bytes = rows * blocks * size.bytes;
  std::unique_ptr<uint8_t[]> data[2];
  for (auto& part : data) {
    part.reset(new uint8_t[bytes]);
    for (uint64_t i = 0; i < bytes; ++i) part[i] = uint8_t(random_word() & 0x3f);  // scales below 2
  }
  const TwoParts stacked{{columns, 2}, {{data[0].get(), format, rows}, {data[1].get(), format, rows}}};
  const std::unique_ptr<float[]> x(new float[x_rows * columns]), out(new float[x_rows * 2 * rows]),
      values(new float[2 * rows * columns]);
  for (uint64_t i = 0; i < x_rows * columns; ++i) x[i] = 1;
  multiply(*kernels(), stacked.weight, x.get(), x_rows, out.get(), pool);
  dequantize(*kernels(), stacked.weight, values.get(), pool);
  bool right = true;
  for (uint64_t row = 0; row < 2 * rows; ++row) {
    double sum = 0, terms = 0;
    for (uint64_t i = 0; i < columns; ++i) {
      sum += values[row * columns + i];
      terms += values[row * columns + i] < 0 ? -values[row * columns + i] : values[row * columns + i];
    }
    for (uint32_t i = 0; i < x_rows; ++i) {
      const double error = out[i * 2 * rows + row] - sum;
      right = right && error <= terms * 1e-5 && -error <= terms * 1e-5;
    }
  }
  const int32_t last = int32_t(2 * rows - 1);
  const std::unique_ptr<float[]> taken(new float[columns]);
  right = right && take_rows(*kernels(), stacked.weight, &last, 1, taken.get()) == 1;
  for (uint64_t i = 0; i < columns; ++i) right = right && taken[i] == values[uint64_t(last) * columns + i];
  return right;
}

}  // namespace

int main() {
  ThreadPool pool(2);
  uint32_t wrong = 0, products = 0;
  for (const GgufFormat format :
       {GgufFormat::kQ4_0, GgufFormat::kQ4_1, GgufFormat::kQ8_0, GgufFormat::kQ4_K, GgufFormat::kQ6_K})
    for (const uint64_t rows : {1, 3, 4, 70})
      for (const uint32_t blocks : {1, 2, 3})
        for (const uint32_t x_rows : {1, 2, 3, 5, 8, 9, 17}) {
          wrong += !is_right(format, rows, blocks, x_rows, pool);
          ++products;
        }
  std::printf("wrong %u products %u\n", wrong, products);
}
