# SPDX-License-Identifier: Apache-2.0
"""What mkdocs does besides its own: links to files outside of docs/ become these files' names."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?<!!)\[([^\[\]]+)\]\((\.\./[^)\s#]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links that leave docs/, which the site does not have."""
    folder = PurePosixPath("docs", page.file.src_uri).parent

    def name(link: re.Match[str]) -> str:
        path = (_ROOT / folder / link[2]).resolve()
        if not path.exists() or (_ROOT / "docs") in path.parents:
            return link[0]
        return f"{link[1]} (`{path.relative_to(_ROOT)}`)"

    return _LINK.sub(name, markdown)
