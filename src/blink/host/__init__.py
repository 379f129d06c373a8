# SPDX-License-Identifier: Apache-2.0
"""This machine: addresses, cores, processes."""
