# SPDX-License-Identifier: Apache-2.0
"""The libraries of the page at /, as npm publishes them; run as a program to fetch the versions of the table anew.

    .venv/bin/python tests/shared/page_libraries.py

src/blink/api/pages/libraries.json names the versions, the packages' digests and the files. A new version: write its
number and npm's `dist.integrity`, run this, and look at what the page shows.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PAGES = Path(__file__).resolve().parents[2] / "src" / "blink" / "api" / "pages"
TABLE, FOLDER = PAGES / "libraries.json", PAGES / "static" / "libraries"


def read_table() -> dict[str, Any]:
    """Return the table: of each package its version, licence, digest and files."""
    return json.loads(TABLE.read_text())


def list_faults(table: dict[str, Any], folder: Path) -> list[str]:
    """Return which files of a folder are missing, changed or not in the table."""
    expected = {name: each["sha256"] for library in table.values() for name, each in library["files"].items()}
    found = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
    return sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))


def fetch(table: dict[str, Any], folder: Path) -> None:
    """Write the table's files into a folder, and their digests into the table.

    Raises:
        ValueError: a package is not the one that the table names.
    """
    for name, library in table.items():
        with TemporaryDirectory() as scratch:
            spec = f"{name}@{library['version']}"
            subprocess.run(["npm", "pack", "--silent", spec], cwd=scratch, check=True, stdout=subprocess.DEVNULL)
            [packed] = Path(scratch).glob("*.tgz")
            digest = base64.b64encode(hashlib.sha512(packed.read_bytes()).digest()).decode()
            if library["integrity"] != f"sha512-{digest}":
                raise ValueError(f"{spec} has the digest sha512-{digest}, the table another.")
            with tarfile.open(packed) as archive:
                for target, each in library["files"].items():
                    member = archive.extractfile(f"package/{each['from']}")
                    assert member is not None, each["from"]
                    content = member.read()
                    (folder / target).parent.mkdir(parents=True, exist_ok=True)
                    (folder / target).write_bytes(content)
                    each["sha256"] = hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    libraries = read_table()
    fetch(libraries, FOLDER)
    TABLE.write_text(json.dumps(libraries, indent=2) + "\n")
