# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: their files, their place in an engine's memory, and how frontends ask for them."""
