# SPDX-License-Identifier: Apache-2.0
"""Latent attention on the GPU."""
