# SPDX-License-Identifier: Apache-2.0
"""What virtual machines are made of: the archive that they boot from, and the packages' versions; without a machine."""

from __future__ import annotations

import gzip
import random
import re
from pathlib import Path

import pytest

import packages as rig_packages
import vm
from initramfs import build_initramfs, file_archive
from packages import Packages, RigUnavailableError, fetch_packages

PINS = {"linux-image-6.1.0-56-amd64": "6.1.192-2", "strace": "6.1-0.1"}


def made_of(folder: Path, seed: int, length: int) -> Packages:
    """Packages of one module and a busybox of random bytes, which nothing packs well."""
    kernel, tools = folder / "kernel", folder / "tools"
    (kernel / "lib/modules/6.1").mkdir(parents=True)
    (kernel / "lib/modules/6.1/9p.ko").write_bytes(b"\0depends=\0" + bytes(range(seed)))
    (tools / "usr/bin").mkdir(parents=True)
    (tools / "usr/bin/busybox").write_bytes(random.Random(seed).randbytes(length))
    return Packages(tools, kernel, {}, {})


@pytest.mark.parametrize("length", range(1000, 1011))
def test_the_next_archive_begins_at_a_multiple_of_four(tmp_path: Path, length: int) -> None:
    made = made_of(tmp_path, length % 7, length)
    data = build_initramfs(made.kernel, made.tools / "usr/bin/busybox")
    assert len(data) % 4 == 0
    packed = data.rstrip(b"\0")
    assert len(data) - len(packed) < 8, "a few zeros, some of which may end the packed data"
    assert b"bin/busybox" in gzip.decompress(data)
    assert len(file_archive("command.sh", b"x" * length)) % 4 == 0


def test_a_machine_boots_from_archives_that_each_begin_at_a_multiple_of_four(tmp_path: Path) -> None:
    data = vm._base(made_of(tmp_path, 3, 1003))
    headers = [match.start() for match in re.finditer(rb"070701[0-9A-F]{104}(init|guest\.sh)\0", data)]
    assert len(headers) == 2 and not any(at % 4 for at in headers)


def test_an_archive_that_was_not_written_whole_is_not_booted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_of(tmp_path, 5, 1001)

    def write_half(path: Path, data: bytes) -> int:
        path.open("wb").write(data[: len(data) // 2])
        raise OSError("no space")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", write_half)
        with pytest.raises(OSError, match="no space"):
            vm._base(made)
    whole = build_initramfs(made.kernel, made.tools / "usr/bin/busybox")
    assert vm._base(made).startswith(whole)


def archive(*listed: tuple[str, str], newest: str) -> object:
    """Play apt with these packages in its lists; what is downloaded becomes a file's name."""

    def apt(command: list[str], folder: Path) -> str:
        if "madison" in command:
            return "".join(f"{name} | {version} | http://deb.debian.org\n" for name, version in listed)
        if "depends" in command:
            return f"linux-image-amd64\n  Depends: {newest}\n"
        if "download" in command:
            (folder / "asked").write_text("\n".join(command[command.index("download") + 1 :]))
        return ""

    return apt


@pytest.mark.parametrize(
    ("listed", "kernel", "tool"),
    [
        (list(PINS.items()), "linux-image-6.1.0-56-amd64=6.1.192-2", "strace=6.1-0.1"),
        ([*list(PINS.items())[:1], ("strace", "6.1-0.2")], "linux-image-6.1.0-56-amd64=6.1.192-2", "strace"),
        ([("strace", "6.1-0.1")], "linux-image-6.1.0-61-amd64", "strace"),
    ],
)
def test_known_versions_are_taken_as_long_as_the_archive_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: list[tuple[str, str]], kernel: str, tool: str
) -> None:
    monkeypatch.setattr(rig_packages, "_pins", lambda: PINS)
    monkeypatch.setattr(rig_packages, "_apt", archive(*listed, newest="linux-image-6.1.0-61-amd64"))
    rig_packages._download_by_any_lists(tmp_path, tmp_path)
    asked = (tmp_path / "asked").read_text().split()
    assert kernel in asked and tool in asked and len([name for name in asked if "linux-image" in name]) == 1


def test_what_is_of_another_version_than_wanted_is_told() -> None:
    found = {"linux-image-6.1.0-61-amd64": "6.1.200-1", "strace": "6.1-0.1"}
    told = Packages(Path(), Path(), found, PINS).describe()
    assert "linux-image-6.1.0-61-amd64 6.1.200-1" in told
    assert "linux-image-6.1.0-56-amd64: wanted 6.1.192-2" in told and "strace" not in told
    assert Packages(Path(), Path(), PINS, PINS).describe() == "rig: linux-image-6.1.0-56-amd64 6.1.192-2"


def test_packages_of_other_pins_or_another_recipe_are_not_the_cached_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig_packages, "_release", lambda: {"ID": "debian", "VERSION_ID": "12"})
    keys = [rig_packages._key()]
    monkeypatch.setattr(rig_packages, "_RECIPE", 1)  # its archives had any length
    keys.append(rig_packages._key())
    monkeypatch.setattr(rig_packages, "PINS", {"12": PINS})
    keys.append(rig_packages._key())
    assert len(set(keys)) == 3


def test_elsewhere_than_on_debian_there_is_no_rig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig_packages, "_release", lambda: {"ID": "fedora", "VERSION_ID": "43"})
    with pytest.raises(RigUnavailableError, match="Debian"):
        fetch_packages()
