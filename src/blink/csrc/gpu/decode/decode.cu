// SPDX-License-Identifier: Apache-2.0
// The kernels of a decoder layer for up to 64 decoding rows; instantiated by name for each model's sizes.
#include "attention.cuh"
#include "embedding.cuh"
#include "gemm.cuh"
#include "gemv.cuh"
