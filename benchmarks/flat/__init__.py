# SPDX-License-Identifier: Apache-2.0
"""Evidence that a server's latency stays flat beside busy neighbours: `make flat`, docs/flat.md."""
