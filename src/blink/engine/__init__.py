# SPDX-License-Identifier: Apache-2.0
"""Start-up and supervision of an engine: weights, KV cache, region, scheduler. Not on the token path."""

import os

# How long OpenMP's threads spin for each other before they sleep; must be set before torch is loaded. Without a limit,
# a step takes ten times as long as soon as something else runs on one of their cores; without spinning, half as long
# again on a quiet machine. About 0.2 ms is within 5 % of the best on a quiet machine.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
