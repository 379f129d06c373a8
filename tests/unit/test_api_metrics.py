# SPDX-License-Identifier: Apache-2.0
"""Metrics: sums over workers that come and go, and histograms against prometheus_client's own."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from blink.api.observe import metrics as names
from blink.api.observe.metric_store import MetricStore
from blink.api.observe.metrics import NUM_VALUES, Metrics
from blink.errors import ConfigError
from blink.region.layout import STATISTICS

_WORKER = """
import sys
from pathlib import Path
from blink.api.observe.metric_store import MetricStore
store = MetricStore(sys.argv[2], 3, Path(sys.argv[1]))
store.values[1] = float(sys.argv[3])
print("ready", flush=True)
sys.stdin.read()
"""


def start_worker(folder: Path, region: str, value: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _WORKER, str(folder), region, str(value)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    return worker


def test_a_scrape_sums_living_and_dead_workers_of_its_region_only(tmp_path: Path) -> None:
    store = MetricStore("one", 3, tmp_path)
    store.values[1] = 1.0
    sibling, other = start_worker(tmp_path, "one", 20.0), start_worker(tmp_path, "two", 300.0)
    assert store.sum() == [0.0, 21.0, 0.0]
    sibling.kill()
    sibling.communicate()
    again = start_worker(tmp_path, "one", 4000.0)
    assert store.sum() == [0.0, 4021.0, 0.0]
    for worker in (again, other):
        worker.communicate()
    store.close()


def test_a_region_without_living_workers_starts_from_zero(tmp_path: Path) -> None:
    start_worker(tmp_path, "one", 5.0).communicate()
    start_worker(tmp_path, "two", 5.0).communicate()
    store = MetricStore("one", 3, tmp_path)
    assert store.sum() == [0.0, 0.0, 0.0]
    assert len(list(tmp_path.glob("*/*.worker"))) == 1
    store.close()


@pytest.mark.parametrize("kind", ["link", "open to all"])
def test_a_directory_into_which_others_could_write_is_refused(tmp_path: Path, kind: str) -> None:
    target, directory = tmp_path / "target", tmp_path / f"blink.metrics-{os.geteuid()}"
    target.mkdir()
    if kind == "link":
        directory.symlink_to(target)
    else:
        directory.mkdir()
        directory.chmod(0o777)
    with pytest.raises(ConfigError, match="nobody else may write"):
        MetricStore("one", 3, tmp_path)
    assert not [*target.iterdir(), *directory.iterdir()]


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    target, directory = tmp_path / "target", tmp_path / f"blink.metrics-{os.geteuid()}"
    target.write_text("precious")
    directory.mkdir(mode=0o700)
    (directory / "lock").symlink_to(target)
    with pytest.raises(ConfigError, match="link"):
        MetricStore("one", 3, tmp_path)
    assert target.read_text() == "precious"


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.geteuid()
    MetricStore("one", 3, tmp_path).close()
    (tmp_path / f"blink.metrics-{uid}").rename(tmp_path / f"blink.metrics-{uid + 1}")
    monkeypatch.setattr("blink.api.observe.metric_store.os.geteuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {uid}"):
        MetricStore("one", 3, tmp_path)


def test_a_full_shm_is_one_clear_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("blink.api.observe.metric_store.os.posix_fallocate", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        MetricStore("one", 3, tmp_path)
    assert not [*tmp_path.glob("*/*.worker")]


def test_sums_outlive_deleted_and_truncated_files(tmp_path: Path) -> None:
    store = MetricStore("one", 3, tmp_path)
    store.values[1] = 1.0
    sibling = start_worker(tmp_path, "one", 20.0)
    files = [*tmp_path.glob("*/*.worker")]
    assert len(files) == 2
    store._path.unlink()
    assert store.sum() == [0.0, 21.0, 0.0]
    os.truncate(next(path for path in files if path != store._path), 0)
    assert store.sum() == [0.0, 1.0, 0.0]
    sibling.communicate()
    store.close()


@pytest.mark.parametrize("damage", ["file", "folder", "cut"])
def test_files_that_are_deleted_or_cut_are_written_anew(tmp_path: Path, damage: str) -> None:
    store = MetricStore("one", 1024, tmp_path)
    store.values[1] = 5.0
    folder = next(tmp_path.iterdir())
    file = next(folder.glob("*.worker"))
    if damage == "folder":
        shutil.rmtree(folder)
    elif damage == "file":
        file.unlink()
    else:
        os.truncate(file, 0)
    store.restore()
    expected = 0.0 if damage == "cut" else 5.0  # what was cut off is lost
    assert store.sum()[1] == expected
    store.values[1] += 1.0
    sibling = MetricStore("one", 1024, tmp_path)
    assert sibling.sum()[1] == expected + 1.0
    sibling.close()
    store.close()


def test_memory_that_is_missing_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ConfigError, match="No space left"):
        MetricStore("one", 3, tmp_path)
    assert not list(tmp_path.glob("*/*.worker"))


@pytest.fixture
def metrics(tmp_path: Path) -> Metrics:
    stats = {"num_running": 3, "num_waiting": 2, "num_blocks": 8, "num_blocks_used": 2, "generation_tokens": 99}
    metrics = Metrics(MetricStore("test", NUM_VALUES, tmp_path), [lambda: stats])
    metrics.model_name = "m"
    return metrics


def samples(text: bytes) -> dict[tuple[str, str], float]:
    """The values by name and le label."""
    return {
        (sample.name, sample.labels.get("le", sample.labels.get("finished_reason", ""))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_histograms_equal_the_librarys_own(metrics: Metrics) -> None:
    values = [0.0, 0.001, 0.0011, 0.3, 5.0, 9e9]
    for value in values:
        metrics.of(0).observe(names.TTFT, value)
    ours = {key: value for key, value in samples(metrics.render()).items() if names.TTFT in key[0]}
    registry = CollectorRegistry()
    bounds = [float(le) for name, le in ours if name.endswith("_bucket")]
    reference = Histogram(f"vllm:{names.TTFT}", "x", buckets=bounds, registry=registry)
    for value in values:
        reference.observe(value)
    expected = samples(generate_latest(registry))
    assert ours == {key: value for key, value in expected.items() if not key[0].endswith("_created")}


def test_the_text_is_what_the_library_writes(metrics: Metrics) -> None:
    metrics.model_name = 'a "strange"\\name\n'
    metrics.of(0).observe(names.TTFT, 0.25)
    metrics.keep([(3, 1)])
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    assert metrics.render() == generate_latest(registry)


def test_the_text_follows_its_values_and_whoever_comes_and_goes(tmp_path: Path) -> None:
    stats: dict[str, int] = {}
    metrics = Metrics(MetricStore("test", NUM_VALUES, tmp_path), [lambda: stats])
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    sibling = MetricStore("test", NUM_VALUES, tmp_path)

    def start_engine(blocks: int) -> None:
        stats.update(num_blocks=blocks, num_blocks_used=3, heartbeat=2_000_000, num_running=2)

    changes = [
        lambda: None,
        lambda: start_engine(8),
        lambda: setattr(metrics, "model_name", "100 %s of a model"),
        lambda: metrics.of(0).observe(names.ITL, 0.003),
        lambda: metrics.of(0).observe(names.ITL, 1e7),
        lambda: metrics.of(0).count_finished("stop"),
        lambda: metrics.count_rejection("queue_full"),
        lambda: sibling.values.__setitem__(0, 4.0),
        lambda: metrics.keep([(5, 2)]),
        lambda: sibling._path.unlink(),
        lambda: start_engine(16),
        stats.clear,
    ]
    texts: list[bytes] = []
    for change in changes:
        change()
        texts.append(metrics.render())
        assert texts[-1] == generate_latest(registry)
    assert len(set(texts)) == len(changes)


def test_names_and_labels_are_vllms(metrics: Metrics) -> None:
    metrics.of(0).count_finished("length")
    text = metrics.render().decode()
    for line in (
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0',
        'vllm:num_requests_waiting{engine="0",model_name="m"} 2.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25',
        'vllm:generation_tokens_total{engine="0",model_name="m"} 99.0',
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 1.0',
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 0.0',
    ):
        assert line in text.splitlines()


def test_every_statistic_of_the_engine_has_a_metric_but_those_that_workers_count(tmp_path: Path) -> None:
    stats = {name: 1000 + place for place, name in enumerate(STATISTICS.names or ()) if name != "accepted_at"}  # a list
    page = samples(Metrics(MetricStore("test", NUM_VALUES, tmp_path), [lambda: stats]).render())
    assert page["blink:finished_error_total", ""] == stats["finished_error"]
    shown = {*page.values(), *(round(value * 1e9) for value in page.values())}  # seconds too
    missing = {name for name, value in stats.items() if value not in shown}
    # Of the blocks, their share is shown; how sequences ended is in request_success.
    assert missing == {"num_blocks", "num_blocks_used", "finished_stop", "finished_length", "finished_abort"}
