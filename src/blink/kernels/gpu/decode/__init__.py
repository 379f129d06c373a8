# SPDX-License-Identifier: Apache-2.0
"""Kernels of a decoder layer for rows that decode, one token each. They overlap their neighbours' edges."""
