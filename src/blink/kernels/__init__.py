# SPDX-License-Identifier: Apache-2.0
"""The operations of the model: each file holds a checked wrapper and its plain PyTorch reference."""
