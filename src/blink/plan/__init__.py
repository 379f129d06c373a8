# SPDX-License-Identifier: Apache-2.0
"""What a step computes and by which kernels: data alone, without torch."""
