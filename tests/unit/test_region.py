# SPDX-License-Identifier: Apache-2.0
"""The region: who may create, open and claim it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from blink.config import EngineConfig
from blink.engine.geometry import build_geometry
from blink.errors import ConfigError, EngineUnavailableError, LayoutMismatchError
from blink.region.files import check_unserved, region_path, remove_stale_regions
from blink.region.layout import CONSTANTS, CQE, DIGEST, SQE
from blink.region.memory import (
    QueuePairAddresses,
    Region,
    claim_queue_pair,
    create_region,
    open_region,
    publish_region,
)
from blink.region.outside import HASH_KEY_VARIABLE

PAIRS = 3


def small_geometry() -> Any:
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, block_size=8, num_queue_pairs=PAIRS)
    return build_geometry(config, max_model_len=64, vocab_size=97, num_blocks=16)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"unit-{os.getpid()}-{abs(hash(request.node.name)) % 10**8}"
    yield name
    for path in region_path(name).parent.glob(f"{region_path(name).name}*"):
        path.unlink()


@pytest.fixture
def region(name: str) -> Iterator[Region]:
    region = create_region(name, small_geometry(), "a model")
    publish_region(region, name)
    yield region
    region.close()


def test_a_region_is_invisible_until_it_is_published(name: str) -> None:
    region = create_region(name, small_geometry(), "m")
    with pytest.raises(EngineUnavailableError, match="not running"):
        open_region(name)
    publish_region(region, name)
    opened = open_region(name)
    assert opened.header["epoch"] != 0 and opened.inode == region.inode
    opened.close()
    region.close()


def test_engines_that_are_given_one_secret_hash_alike_and_others_do_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key() -> bytes:
        region = create_region(name, small_geometry(), "m")
        found = region.header["hash_key"].tobytes()
        region.remove()
        region.close()
        return found

    assert key() != key() and len(key()) == 16
    monkeypatch.setenv(HASH_KEY_VARIABLE, "00ff" * 8)
    assert key() == key() == bytes.fromhex("00ff" * 8)
    for wrong in ("", "00ff", "g" * 32):
        monkeypatch.setenv(HASH_KEY_VARIABLE, wrong)
        with pytest.raises(ConfigError, match="32 hexadecimal digits"):
            key()


def test_an_opened_region_tells_what_the_engine_wrote(region: Region, name: str) -> None:
    opened = open_region(name)
    assert bytes(opened.header["model"]) == b"a model" and opened.header["digest"] == DIGEST
    assert opened.geometry.tobytes() == small_geometry().tobytes()
    region.control["heartbeat"] = 12345
    assert opened.heartbeat() == 12345
    opened.store_control("drain", 7)
    assert region.control_word("drain") == 7
    opened.close()


def test_hash_keys_differ_between_engines(name: str) -> None:
    keys = set[bytes]()
    for _ in range(2):
        region = create_region(name, small_geometry(), "m")
        keys.add(region.header["hash_key"].tobytes())
        region.close()
    assert len(keys) == 2


def test_a_region_of_another_build_is_refused(region: Region, name: str) -> None:
    region.header["digest"] ^= np.uint64(1)
    with pytest.raises(LayoutMismatchError, match="another build"):
        open_region(name)


def test_a_name_that_a_live_engine_serves_is_refused(region: Region, name: str) -> None:  # noqa: ARG001
    with pytest.raises(ConfigError, match="another engine serves"):
        create_region(name, small_geometry(), "m")


def test_a_dead_engine_gives_its_name_free(name: str) -> None:
    region = create_region(name, small_geometry(), "m")
    publish_region(region, name)
    old = region.inode
    region.close()
    check_unserved(name)
    successor = create_region(name, small_geometry(), "m")
    publish_region(successor, name)
    opened = open_region(name)
    assert opened.inode == successor.inode != old
    opened.close()
    successor.close()


@pytest.mark.parametrize("bad", ["", "a/b", "../x", "a b", "ä/"])
def test_a_name_that_is_no_file_name_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="region name"):
        region_path(bad)


def test_only_old_regions_without_an_engine_are_removed(
    region: Region, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = region_path(f"{name}-dead")
    dead.write_bytes(CONSTANTS["magic"].to_bytes(8, sys.byteorder))
    dead.chmod(0o600)
    remove_stale_regions()
    assert dead.exists(), "a region that was just made may have its engine still to come"
    now = time.time()
    monkeypatch.setattr("blink.region.files.time.time", lambda: now + 3600)
    remove_stale_regions()
    assert not dead.exists() and region.path.exists()


def test_each_queue_pair_is_claimed_once_and_released_with_its_owner(region: Region, name: str) -> None:  # noqa: ARG001
    owners = [open_region(name) for _ in range(PAIRS + 1)]
    assert [claim_queue_pair(owner) for owner in owners] == [0, 1, 2, None]
    owners[1].close()
    assert claim_queue_pair(owners[3]) == 1
    for owner in owners:
        owner.close()


def test_a_killed_process_releases_its_queue_pair(region: Region, name: str) -> None:  # noqa: ARG001
    code = f"""
from blink.region.memory import *
r = open_region({name!r})
print(claim_queue_pair(r), flush=True)
input()
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "0\n"
    first, second = open_region(name), open_region(name)
    assert claim_queue_pair(first) == 1
    child.kill()
    child.communicate()
    assert claim_queue_pair(second) == 0
    first.close()
    second.close()


def test_parts_of_queue_pairs_do_not_overlap_and_fill_the_region(region: Region) -> None:
    geometry, spans = region.geometry, list[tuple[int, int]]()
    for index in range(PAIRS):
        at = QueuePairAddresses(region, index)
        spans += [(at.base, at.base + 64), (at.scheduler_words, at.scheduler_words + 64)]
        spans.append((at.sq, at.sq + int(geometry["sq_entries"]) * SQE.itemsize))
        spans.append((at.cq, at.cq + int(geometry["cq_entries"]) * CQE.itemsize))
        spans.append((at.arena, at.arena + int(geometry["arena_bytes"])))
        assert at.base % 4096 == at.arena % 64 == 0
    assert spans == sorted(spans)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    trace_end = int(region.header["trace_offset"]) + region.trace().nbytes
    assert trace_end <= spans[0][0] and spans[-1][1] <= len(region.bytes)


def test_a_region_that_does_not_fit_is_refused_with_advice(name: str) -> None:
    geometry = small_geometry()
    geometry["arena_bytes"] = 0xFFFFFFC0
    geometry["num_queue_pairs"] = 64
    free = os.statvfs("/dev/shm")
    if free.f_bavail * free.f_frsize > 64 << 32:
        pytest.skip("/dev/shm has more than 256 GiB")
    with pytest.raises(ConfigError, match="--prompt-arena-bytes"):
        create_region(name, geometry, "m")
    left = [*region_path(name).parent.glob(f"{region_path(name).name}*")]
    assert left == []
