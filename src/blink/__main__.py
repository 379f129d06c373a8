# SPDX-License-Identifier: Apache-2.0
"""Run the command line as `python -m blink`."""

from __future__ import annotations

import sys

from blink.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
