# SPDX-License-Identifier: Apache-2.0
"""The ways to a queue pair: shared memory of this host, or RDMA."""
