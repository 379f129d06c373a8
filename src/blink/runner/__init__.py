# SPDX-License-Identifier: Apache-2.0
"""Plans which kernels a model's steps take, and runs them."""
