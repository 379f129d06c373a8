// SPDX-License-Identifier: Apache-2.0
// The kernels of decoding steps on Hopper; instantiated by name for the sizes of each model. All are templates: what is
// not would be compiled with each of them.
#include "attention.cuh"
#include "embedding.cuh"
#include "gemm_int4.cuh"
#include "gemm_planes_int4.cuh"
#include "gemv_int4.cuh"
#include "gemv_quantized.cuh"
#include "grouped_gemm.cuh"
#include "moe_down.cuh"
#include "moe_gate.cuh"
#include "placement.cuh"
