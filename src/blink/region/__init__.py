# SPDX-License-Identifier: Apache-2.0
"""The shared memory that joins frontends and engine."""
