// SPDX-License-Identifier: Apache-2.0
// The kernels of a decoder layer for a few decoding rows; instantiated by name for each model's sizes.
#include "attention.cuh"
#include "gemv.cuh"
#include "moe_down.cuh"
#include "moe_gate.cuh"
