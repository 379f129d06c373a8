# SPDX-License-Identifier: Apache-2.0
"""Prints what the project and some of its extras need, a line each: python tests/shared/requirements.py EXTRA ..."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from project import read_project


def list_requirements(project: dict[str, Any], extras: Iterable[str]) -> list[str]:
    """Return the requirements of a project and of extras, in the place of an extra that one names those of it."""
    own = re.compile(rf"{re.escape(project['name'])}\[([\w,-]+)\]")
    found: list[str] = list(project["dependencies"])
    left = list(extras)
    while left:
        for requirement in project["optional-dependencies"][left.pop()]:
            named = own.fullmatch(requirement)
            if named:
                left += named[1].split(",")
            else:
                found.append(requirement)
    return found


if __name__ == "__main__":
    print("\n".join(list_requirements(read_project(Path(__file__).parents[2])["project"], sys.argv[1:])))
