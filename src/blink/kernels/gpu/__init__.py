# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the operations, loaded only for tensors on a GPU. Graphs that the GPU launches may hold them.

Each file tells pyright what it cannot see in Triton's language: types of kernels' parameters, launch options, branches
taken at compile time.
"""
