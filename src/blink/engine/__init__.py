# SPDX-License-Identifier: Apache-2.0
"""Start-up and supervision of an engine: weights, KV cache, region, scheduler. Not on the token path."""

import os

# How long OpenMP's threads spin for each other before they sleep; must be set before torch is loaded. Without a limit,
# a step takes ten times as long as soon as something else runs on one of their cores; without spinning, half as long
# again on a quiet machine. About 0.2 ms is within 5 % of the best on a quiet machine.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# How many compiled products of matrices oneDNN keeps, and how many of their descriptions torch does; must be set before
# torch is loaded. Each number of tokens in a step has its own, and with the 1,024 of the defaults the engine grows for
# hours, by hundreds of MB. These hold all small steps of decoding; compiling another takes about a millisecond.
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "64")
# No engine runs on a device that a plugin of torch adds: torch need not look through all packages for one as it loads.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
