# SPDX-License-Identifier: Apache-2.0
"""What runs on a CPU: plain PyTorch, which is the oracle of the GPU's kernels, and calls of the native library."""
