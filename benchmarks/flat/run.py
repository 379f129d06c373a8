# SPDX-License-Identifier: Apache-2.0
"""Measure whether a server's latency stays flat beside busy neighbours: `python benchmarks/flat/run.py --help`.

Without a URL it serves a model itself: what stands after `--` are the arguments of `blink serve`.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Run the protocol; return the exit status."""
    # Not above: the client's processes load this file too, and nothing else of this folder.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from flat.protocol import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
