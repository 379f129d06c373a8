# SPDX-License-Identifier: Apache-2.0
"""Number formats of weights: a module for each says how its numbers lie in files and on a GPU."""
