# SPDX-License-Identifier: Apache-2.0
"""Kernels of a dense decoder layer for up to 64 rows of one token each. They overlap their neighbours' edges."""
