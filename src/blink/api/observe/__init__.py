# SPDX-License-Identifier: Apache-2.0
"""What operators see of the server: metrics, spans, a line of statistics."""
