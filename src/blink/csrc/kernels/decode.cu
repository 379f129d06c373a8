// SPDX-License-Identifier: Apache-2.0
// The kernels of decoding steps on Hopper; instantiated by name for the sizes of each model. All are templates: what is
// not would be compiled with each of them.
#include "kernels/attention/attention.cuh"
#include "kernels/gemm/embedding.cuh"
#include "kernels/gemm/gemm_hi_lo_int4.cuh"
#include "kernels/gemm/gemm_int4.cuh"
#include "kernels/gemm/gemv_int4.cuh"
#include "kernels/gemm/gemv_quantized.cuh"
#include "kernels/moe/grouped_gemm.cuh"
#include "kernels/moe/moe_down.cuh"
#include "kernels/moe/moe_gate.cuh"
#include "kernels/moe/permutation.cuh"
