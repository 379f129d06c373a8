# SPDX-License-Identifier: Apache-2.0
"""Start-up and supervision of an engine: weights, KV cache, region, scheduler. Not on the token path."""
