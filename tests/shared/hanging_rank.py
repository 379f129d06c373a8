# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingParameterType=false, reportOperatorIssue=false
"""`blink` on several GPUs, of which the second hangs once a file exists: python hanging_rank.py FILE ARGUMENTS."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from blink.cli.main import main
from blink.engine.gpu_group import Follower
from blink.plan.site import Bucket

_SECONDS = 8  # after which a step goes on, so that nothing hangs for ever


@triton.jit
def _hang(flag, limit):
    begin, now = globaltimer(), globaltimer()
    while (tl.load(flag, volatile=True) != 0) & (now - begin < limit):
        now = globaltimer()


def let_it_hang(begin: Path) -> None:
    """Let each step of the second rank wait while a word in the host's memory is set, which a thread does."""
    flag, run = torch.zeros(1, dtype=torch.int32).pin_memory(), Follower.run_step

    def run_and_hang(follower: Follower, size: Bucket, **options: Any) -> None:
        if follower.ranks.rank == 1:
            _hang[(1,)](flag, _SECONDS * 10**9)
        run(follower, size, **options)

    def watch() -> None:
        while not begin.exists():
            time.sleep(0.002)
        flag.fill_(1)

    Follower.run_step = run_and_hang  # pyright: ignore[reportAttributeAccessIssue]
    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    let_it_hang(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
