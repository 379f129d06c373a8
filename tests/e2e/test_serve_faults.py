# SPDX-License-Identifier: Apache-2.0
"""`blink serve` when its files, its parts or the machine fail: it is back by itself, or ends with one clear line."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from blink.region.files import region_path
from ports import free_port
from processes import wait_for
from served import PATIENCE, Served, serve_command, served

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("faults")) as server:
        yield server


def refused(command: list[str], prepare: Callable[[], None] | None = None) -> str:
    """Run a command that must refuse at once, with exit status 2 and one line; return that line."""
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, preexec_fn=prepare)
    assert run.returncode == 2, run.stderr
    assert run.stderr.startswith("blink: error: ") and run.stderr.count("\n") == 1
    return run.stderr


def test_a_second_server_on_a_region_is_refused_and_harms_nothing(server: Served) -> None:
    before, engine = server.answer(), server.child("engine")
    inode = region_path(server.region).stat().st_ino
    for command in ("serve", "engine"):
        line = [*serve_command(server.folder), f"--region={server.region}"]
        line[line.index("serve")] = command
        assert server.region in refused(line)
    assert region_path(server.region).stat().st_ino == inode and server.child("engine") == engine
    assert server.answer() == before


def test_a_deleted_region_is_there_again_with_the_same_engine(server: Served) -> None:
    before, engine = server.answer(), server.child("engine")
    started = time.monotonic()
    region_path(server.region).unlink()
    wait_for(lambda: server.says("was deleted, and is there again"), PATIENCE)
    wait_for(server.is_ready, PATIENCE)
    assert server.answer() == before and server.child("engine") == engine
    away = time.monotonic() - started
    print(f"deleted region: back after {away:.1f} s")
    assert away <= server.most_away


@pytest.mark.long  # in the gate: test_cli_serve.py
def test_a_killed_engine_is_replaced(server: Served) -> None:
    before, engine, frontend = server.answer(), server.child("engine"), server.child("frontend")
    with server.recovering("killed engine"):
        os.kill(engine, signal.SIGKILL)
    assert server.child("engine") != engine and server.child("frontend") == frontend
    assert server.answer() == before


def test_a_hung_frontend_is_replaced(server: Served) -> None:
    before, frontend = server.answer(), server.child("frontend")
    with server.recovering("hung frontend"):
        os.kill(frontend, signal.SIGSTOP)
    assert server.says("frontend 0 has given no sign of life for")
    assert server.child("frontend") != frontend and server.answer() == before


def test_metrics_whose_files_were_deleted_are_still_answered(server: Served) -> None:
    server.answer()
    for path in Path(f"/dev/shm/blink.metrics-{os.geteuid()}").glob(f"{server.region}.*"):
        path.unlink()
    page = httpx.get(f"http://127.0.0.1:{server.port}/metrics", timeout=PATIENCE, trust_env=False)
    assert page.status_code == 200
    assert 'vllm:request_success_total{engine="0",finished_reason="length"' in page.text


@pytest.mark.long
def test_a_region_that_was_deleted_with_its_spare_brings_a_new_engine(server: Served) -> None:
    before, engine = server.answer(), server.child("engine")
    with server.recovering("region deleted with its spare"):
        for path in Path("/dev/shm").glob(f"blink-{server.region}*"):
            if not path.name.endswith("~lock"):
                path.unlink()
    assert server.says("was deleted, replaced or truncated")
    assert server.answer() == before and server.child("engine") != engine


@pytest.mark.long
def test_a_truncated_region_and_truncated_metrics_bring_new_processes(server: Served) -> None:
    before, engine = server.answer(), server.child("engine")
    with server.recovering("truncated region"):
        os.truncate(region_path(server.region), 4096)
    assert server.answer() == before and server.child("engine") != engine
    back = server.was_back()
    os.kill(server.child("frontend"), signal.SIGKILL)  # its file may have been deleted by a test before
    server.wait_until_back(back)
    for path in Path(f"/dev/shm/blink.metrics-{os.geteuid()}").glob(f"{server.region}.*"):
        os.truncate(path, 0)
    with suppress(httpx.HTTPError):  # the frontend dies of it unless it was quicker to write them anew
        server.answer()
    wait_for(server.is_ready, PATIENCE)
    assert server.answer() == before


@pytest.mark.long
def test_a_hung_engine_is_replaced(server: Served) -> None:
    before, engine = server.answer(), server.child("engine")
    os.kill(engine, signal.SIGSTOP)
    wait_for(lambda: server.says("the engine has shown no heartbeat for"), PATIENCE)
    server.wait_until_back(server.was_back())
    assert server.answer() == before and server.child("engine") != engine


@pytest.mark.long
def test_an_engine_that_dies_while_it_boots_ends_the_server_at_once(tmp_path: Path) -> None:
    command = [*serve_command(tmp_path), f"--port={free_port()}", f"--region=faults-boot-{os.getpid()}"]
    command += ["--num-gpu-blocks-override=0", "--kv-cache-memory-bytes=100000G"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 2
    [line] = [line for line in run.stderr.splitlines() if line.startswith("blink: error: ")]
    assert "--kv-cache-memory-bytes" in line and "Traceback" not in run.stderr
    assert run.stderr.count("starting the engine") == 1


def test_an_engine_that_is_killed_while_it_boots_is_not_started_again(tmp_path: Path) -> None:
    server = Served(tmp_path)
    wait_for(lambda: server.has_child("engine"), PATIENCE)
    os.kill(server.child("engine"), signal.SIGKILL)
    assert server.process.wait(PATIENCE) == 1
    assert server.says("the engine was killed by SIGKILL while it booted") and not server.says("again")


@pytest.mark.long
def test_what_killed_servers_leave_in_shm_does_not_grow(tmp_path: Path) -> None:
    """Whoever starts later deletes it; a minute must have passed, which the start is made to believe."""
    server = Served(tmp_path)
    wait_for(server.is_ready, PATIENCE)
    metrics = Path(f"/dev/shm/blink.metrics-{os.geteuid()}")
    processes = [server.process.pid, server.child("engine"), server.child("frontend")]
    for process in processes:
        os.kill(process, signal.SIGKILL)
    server.process.wait(PATIENCE)
    wait_for(lambda: not any(_is_running(process) for process in processes), PATIENCE)
    kinds = {path.name.partition("~")[2].split("-")[0] for path in Path("/dev/shm").glob(f"blink-{server.region}*")}
    assert kinds == {"", "lock", "spare", "model"} and [*metrics.glob(f"{server.region}.*")], (
        "the test has nothing to see"
    )
    clean = "import time; t = time.time; time.time = lambda: t() + 61;"
    clean += "from blink.region.files import remove_stale_regions; remove_stale_regions();"
    clean += "from blink.api.observe.metric_store import MetricStore; MetricStore('other', 3).close()"
    subprocess.run([sys.executable, "-c", clean], check=True, timeout=PATIENCE)
    assert not [*Path("/dev/shm").glob(f"blink-{server.region}*")] and not [*metrics.glob(f"{server.region}.*")]


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_too_few_descriptors_are_said_in_one_line(tmp_path: Path) -> None:
    for command in ("serve", "engine", "frontend"):
        line = serve_command(tmp_path)
        line[line.index("serve") :] = [command]
        assert "LimitNOFILE" in refused(line, lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 100)))


@pytest.mark.long
def test_a_full_shm_is_said_in_one_line(tmp_path: Path) -> None:
    small = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = "mount -t tmpfs -o size=256k tmpfs /dev/shm"
    if subprocess.run([*small, mount], capture_output=True, check=False).returncode:
        pytest.skip("needs user namespaces, to mount a small /dev/shm")
    command = [*small, f'{mount} && exec "$@"', "sh", *serve_command(tmp_path), f"--port={free_port()}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 2, run.stderr
    [line] = [line for line in run.stderr.splitlines() if line.startswith("blink: error: ")]
    assert "/dev/shm has no room" in line and "Traceback" not in run.stderr
