# SPDX-License-Identifier: Apache-2.0
"""`blink serve` as a replica's child process: it stops in order when the replica ends, however that ends."""

from __future__ import annotations

import signal
import sys

from blink.cli.main import main
from blink.host.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    sys.exit(main(sys.argv[2:]))
