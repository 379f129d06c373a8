# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch: what runs on a CPU, and the oracle of the GPU's kernels."""
