# SPDX-License-Identifier: Apache-2.0
"""Start-up and supervision of an engine: weights, KV cache, region, scheduler. Not on the token path."""

import os

# OpenMP's threads spin while they wait for each other. When something else takes one of their cores, the others burn
# theirs to no end and a step takes several times as long. Must be set before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
