# SPDX-License-Identifier: Apache-2.0
"""The GPU engine's heartbeat timeout: its scheduler runs on a CPU here and is stepped by hand."""

from __future__ import annotations

import pytest

from harness import running, small_config

gpu = pytest.importorskip("blink.engine.gpu")


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now


def test_an_engine_ends_when_its_scheduler_has_fallen_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(gpu, "time", clock)
    with running(small_config()) as h:
        engine = gpu.GpuEngine.__new__(gpu.GpuEngine)
        engine._region, engine._heartbeat_age = h.region, gpu.HeartbeatAge()
        engine._heartbeat, engine.is_dead, engine._energy = 0, False, None
        for _ in range(100):  # 25 s
            h.step(250)
            assert engine._advance()
        clock.now += 3600  # the host process was stopped, the scheduler was not
        h.step(250)
        assert engine._advance()
        begin = clock.now
        while engine._advance():
            pass
    assert engine.is_dead and 10 < clock.now - begin < 11
    assert "no sign of life for 10 s" in caplog.text
