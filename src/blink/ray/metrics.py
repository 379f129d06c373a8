# SPDX-License-Identifier: Apache-2.0
"""The metrics of several replicas as one page: each keeps its samples, told apart by the label `engine`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Blink's frontends write this label in every sample: an engine does not know of others.
_LABEL: Final = 'engine="0"'


def merge_metrics(pages: Mapping[str, bytes]) -> bytes:
    """Return one page of the pages of some replicas, each family's samples together (the text format asks for it)."""
    heads: dict[str, str] = {}  # of families, by name
    samples: dict[str, list[str]] = {}
    for replica, page in pages.items():
        family = ""
        for line in page.decode().splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                heads.setdefault(family, "")
            if not line.startswith("#"):
                samples.setdefault(family, []).append(line.replace(_LABEL, f'engine="{replica}"', 1))
            elif line not in heads[family]:
                heads[family] += line + "\n"
    return "".join(heads[name] + "".join(f"{line}\n" for line in samples.get(name, ())) for name in heads).encode()
