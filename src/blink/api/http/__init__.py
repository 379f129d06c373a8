# SPDX-License-Identifier: Apache-2.0
"""HTTP: the connection, what stands before the routes, bodies on their way, errors."""
