# SPDX-License-Identifier: Apache-2.0
"""Low-rank updates (LoRA) on a GPU: the adapters' memory, and the kernels that add what they change."""
