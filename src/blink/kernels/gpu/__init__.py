# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the operations, loaded only for tensors on a GPU. Graphs that the GPU launches may hold them."""
