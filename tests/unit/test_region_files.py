# SPDX-License-Identifier: Apache-2.0
"""Files in /dev/shm that are somebody else's, planted, deleted, truncated or taken: refused, and never harmed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blink.config import EngineConfig
from blink.engine.geometry import build_geometry
from blink.errors import BlinkError, ConfigError, EngineUnavailableError
from blink.region.engine_socket import socket_path
from blink.region.files import Reservation, check_unserved, region_path, remove_stale_regions, remove_unserved
from blink.region.memory import Region, create_region, open_region, publish_region
from blink.region.outside import read_heartbeat

_HOLDER = """
import sys
from blink.region.files import Reservation
held = Reservation(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def small_geometry() -> Any:
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, block_size=8, num_queue_pairs=1)
    return build_geometry(config, max_model_len=64, vocab_size=97, num_blocks=16)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"files-{os.getpid()}-{abs(hash(request.node.name)) % 10**8}"
    yield name
    for path in region_path(name).parent.glob(f"{region_path(name).name}*"):
        path.unlink()


@pytest.fixture
def region(name: str) -> Iterator[Region]:
    region = create_region(name, small_geometry(), "m")
    publish_region(region, name)
    yield region
    region.close()


def plant(kind: str, path: Path, target: Path) -> None:
    """Put what is no region of this user where one is looked for."""
    target.write_bytes(b"precious")
    target.chmod(0o600)
    if kind == "link":
        path.symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"x" * 8192)
        path.chmod(0o666 if kind == "open to all" else 0o600)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "open to all"])
def test_what_is_no_file_of_this_users_own_is_refused_by_engine_and_frontend(
    name: str, tmp_path: Path, kind: str
) -> None:
    target = tmp_path / "target"
    plant(kind, region_path(name), target)
    try:
        for attempt in (lambda: open_region(name), lambda: create_region(name, small_geometry(), "m")):
            with pytest.raises(ConfigError, match=region_path(name).name):
                attempt()
        remove_unserved(region_path(name))
        assert region_path(name).is_symlink() or region_path(name).exists()
        assert target.read_bytes() == b"precious"
        assert read_heartbeat(name) is None
    finally:
        if kind == "folder":
            region_path(name).rmdir()


def test_a_file_of_another_user_is_refused(name: str, region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.geteuid()
    monkeypatch.setattr("blink.region.files.os.geteuid", lambda: uid + 1)
    for attempt in (lambda: open_region(name), lambda: check_unserved(name)):
        with pytest.raises(ConfigError, match=f"belongs to user {uid}"):
            attempt()
    remove_unserved(region.path)
    assert region.path.exists()


def test_only_files_that_are_known_to_be_regions_are_deleted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = region_path(f"{name}-foreign")
    foreign.write_bytes(b"not Blink's")
    foreign.chmod(0o600)
    killed = create_region(f"{name}-killed", small_geometry(), "m")
    killed.close()
    held, left = Reservation(f"{name}-held"), region_path(f"{name}-left").with_name(f"blink-{name}-left~lock")
    left.write_bytes(b"1234")
    left.chmod(0o600)
    now = time.time()
    monkeypatch.setattr("blink.region.files.time.time", lambda: now + 3600)
    remove_stale_regions()
    remove_unserved(foreign)
    assert foreign.exists() and not killed.path.exists()
    assert region_path(f"{name}-held").with_name(f"blink-{name}-held~lock").exists() and not left.exists()
    held.close()


def test_a_socket_is_deleted_once_nobody_listens_and_a_minute_has_passed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = socket_path(name, "model")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        now = time.time()
        monkeypatch.setattr("blink.region.files.time.time", lambda: now + 3600)
        remove_stale_regions()
        assert path.exists()
    monkeypatch.setattr("blink.region.files.time.time", lambda: now)
    remove_stale_regions()
    assert path.exists()
    monkeypatch.setattr("blink.region.files.time.time", lambda: now + 3600)
    remove_stale_regions()
    assert not path.exists()


def test_a_name_that_was_taken_meanwhile_is_left_to_its_taker(name: str) -> None:
    late = create_region(name, small_geometry(), "late")
    first = create_region(name, small_geometry(), "first")
    publish_region(first, name)
    with pytest.raises(ConfigError, match="another engine serves"):
        publish_region(late, name)
    assert region_path(name).stat().st_ino == first.inode and first.is_current()
    assert not late.path.exists()
    late.close()
    first.close()


@pytest.mark.parametrize("damage", [b"\0" * 4096, b"x" * 8192, b"\xff", b"#!/bin/sh\n", b"region?\0"])
def test_a_region_whose_head_was_overwritten_is_replaced_by_who_has_reserved_its_name(
    name: str, region: Region, damage: bytes
) -> None:
    os.pwrite(region.fd, damage, 0)
    remove_unserved(region.path)
    assert region.path.exists()
    held = Reservation(name)
    remove_unserved(region.path)
    assert region.path.exists()  # its engine lives
    region.close()
    code = "import sys, pathlib, blink.region.files as f; f.remove_unserved(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(region.path)], check=True)  # as the engine does
    assert not region.path.exists()
    held.close()


def test_a_file_that_is_no_region_is_named_where_nobody_has_reserved_the_name(name: str) -> None:
    region_path(name).write_bytes(b"x" * 512)
    region_path(name).chmod(0o600)
    new = create_region(name, small_geometry(), "new")
    with pytest.raises(ConfigError, match=f"{region_path(name)} is no region's file; delete it"):
        publish_region(new, name)
    assert region_path(name).read_bytes() == b"x" * 512
    new.close()
    held = Reservation(name)
    new = create_region(name, small_geometry(), "new")
    publish_region(new, name)
    assert new.is_current()
    new.close()
    held.close()


def test_a_region_deletes_its_own_file_only(name: str, region: Region) -> None:
    region.path.unlink()
    assert not region.is_current()
    successor = create_region(name, small_geometry(), "m")
    publish_region(successor, name)
    region.remove()
    assert successor.is_current() and not region.is_current()
    successor.close()


@pytest.mark.parametrize("size", [0, 8, 4096, -8])
def test_a_truncated_region_is_refused_and_noticed(name: str, region: Region, size: int) -> None:
    os.truncate(region.path, size if size >= 0 else len(region.bytes) + size)
    assert not region.is_current()
    with pytest.raises(EngineUnavailableError, match="truncated"):
        open_region(name)
    if size in (0, 8):
        assert read_heartbeat(name) is None


def test_a_heartbeat_is_read_from_the_file(name: str, region: Region) -> None:
    region.control["heartbeat"] = 0x1_0000_0002
    assert read_heartbeat(name) == 0x1_0000_0002
    assert read_heartbeat(f"{name}-absent") is None


def test_a_reserved_name_is_refused_to_other_processes_until_its_holder_dies(name: str) -> None:
    command = [sys.executable, "-c", _HOLDER, name]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match="another server has the region"):
        Reservation(name)
    with pytest.raises(ConfigError, match=f"process {holder.pid}, a server"):
        create_region(name, small_geometry(), "m")
    holder.kill()
    holder.communicate()
    check_unserved(name)
    Reservation(name).close()
    assert not [*region_path(name).parent.glob(f"{region_path(name).name}*")]


def test_the_holder_of_a_name_and_its_children_may_serve_it(name: str) -> None:
    held = Reservation(name)
    check_unserved(name)
    code = f"from blink.region.files import check_unserved; check_unserved({name!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    held.close()


def test_a_full_shm_ends_a_reservation_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("blink.region.files.os.pwrite", full)
    for attempt in (lambda: Reservation(name), lambda: create_region(name, small_geometry(), "m")):
        with pytest.raises(BlinkError, match="No space left"):
            attempt()
    assert not [*region_path(name).parent.glob(f"{region_path(name).name}.*")]


def test_a_deleted_region_gets_its_name_back_from_the_spare_one(name: str, region: Region) -> None:
    region.keep_spare(name)
    region.path.unlink()
    assert region.restore() and region.is_current()
    opened = open_region(name)
    assert opened.inode == region.inode
    opened.close()
    region.path.unlink()
    region.path.write_bytes(b"another file")
    assert not region.restore()
    assert region.path.read_bytes() == b"another file"
    region.remove()
    assert [*region.path.parent.glob(f"{region.path.name}*")] == [region.path]


def test_spare_names_of_a_killed_engine_go_with_its_region(name: str, region: Region) -> None:
    region.keep_spare(name)
    remove_unserved(region.path)
    assert region.restore() is False and region.is_current()
    region.close()
    remove_unserved(region.path)
    assert not [*region.path.parent.glob(f"{region.path.name}*")]
