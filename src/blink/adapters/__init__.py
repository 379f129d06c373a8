# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: their files, the memory that an engine has for them, and how frontends ask for them."""
