// SPDX-License-Identifier: Apache-2.0
// The kernels of decoding steps on Hopper; instantiated by name for the sizes of each model. All are templates: what is
// not would be compiled with each of them.
//
// One persistent kernel for all layers was slower on an H200: a hand-over from all blocks to all takes 2 to 3.5 us, and
// a layer has four or five. A launch that overlaps its predecessor (PDL) takes 1 to 2 us.
#include "kernels/attention/attention.cuh"
#include "kernels/gemm/embedding.cuh"
#include "kernels/gemm/gemm_hi_lo_int4.cuh"
#include "kernels/gemm/gemm_int4.cuh"
#include "kernels/gemm/gemm_updated.cuh"
#include "kernels/gemm/gemv_int4.cuh"
#include "kernels/gemm/gemv_quantized.cuh"
#include "kernels/gemm/shrink.cuh"
#include "kernels/moe/grouped_gemm.cuh"
#include "kernels/moe/moe_down.cuh"
#include "kernels/moe/moe_gate.cuh"
#include "kernels/moe/permutation.cuh"
