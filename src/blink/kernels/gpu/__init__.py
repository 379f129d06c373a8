# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the operations, loaded only where tensors are on a GPU. All may be captured in a device-launched graph."""
