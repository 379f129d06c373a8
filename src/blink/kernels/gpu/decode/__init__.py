# SPDX-License-Identifier: Apache-2.0
"""Kernels of a decoder layer for a few rows that decode, one token each. They overlap their neighbours' edges."""
