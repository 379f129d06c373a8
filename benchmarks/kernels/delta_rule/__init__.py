# SPDX-License-Identifier: Apache-2.0
"""Kernels of gated delta-net layers (Qwen3-Next, Qwen 3.5), before the models use them."""
