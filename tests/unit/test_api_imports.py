# SPDX-License-Identifier: Apache-2.0
"""The frontend runs where there is no torch: importing all of it must load nothing of the engine."""

from __future__ import annotations

import os
import subprocess
import sys

# The modules of RDMA are imported too: their library is loaded when used, and here there is none.
_PROBE = """
import importlib, pkgutil, sys
import blink.api, blink.link.rdma.connector
for module in pkgutil.walk_packages(blink.api.__path__, "blink.api."):
    importlib.import_module(module.name)
roots = {name.partition(".")[0] for name in sys.modules}
print(sorted(roots & {"torch", "triton", "transformers", "cuda", "gguf", "safetensors"}))
"""


def test_importing_the_frontend_loads_neither_torch_nor_cuda_nor_rdma() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _PROBE],
        env={**os.environ, "BLINK_VERBS_LIBRARY": "/nothing"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"
