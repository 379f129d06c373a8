# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged KV cache."""
