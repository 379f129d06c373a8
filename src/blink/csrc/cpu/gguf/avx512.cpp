// SPDX-License-Identifier: Apache-2.0
// The block kernels for AVX-512; compiled for it, so nothing here may be called before the processor was asked.
#include "cpu/gguf/kernels.h"

#if defined(__AVX512F__)
#include "cpu/gguf/avx512.h"
#include "cpu/gguf/tiles.h"

namespace blink {

const GgufKernels* avx512_gguf_kernels() { return &kGgufKernels<Avx512>; }

}  // namespace blink
#else
namespace blink {
const GgufKernels* avx512_gguf_kernels() { return nullptr; }
}  // namespace blink
#endif
