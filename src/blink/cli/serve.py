# SPDX-License-Identifier: Apache-2.0
"""The supervisor of `blink serve`: it starts engines and frontends, keeps them alive and stops them in order.

It touches no request. After the start it sleeps, and looks at the children's signs of life twice a second.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import FrameType
from typing import Final

from blink.cli.flags import build_config, to_flags
from blink.cli.replicas import EngineChild, start_engines
from blink.cli.supervision import CONFIG_EXIT_STATUS, Child, describe_exit
from blink.config import FrontendConfig, ServeConfig
from blink.errors import ConfigError
from blink.host.address import Address
from blink.host.isolation import deal_cpus, format_cpus, parse_cpus
from blink.host.logs import set_up_logging
from blink.host.process import raise_descriptor_limit
from blink.hub.localize import localize
from blink.models.weights.files import resolve_model
from blink.region.files import Reservation, check_unserved, engine_regions, region_path, remove_unserved

logger = logging.getLogger("blink.serve")

_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_PROBE_INTERVAL: Final = 0.2  # seconds between looks at /health while not ready
_LOOK_INTERVAL: Final = 0.5  # seconds between looks at the children's signs of life
_STOP_GRACE: Final = 10.0  # seconds beyond its own limits that a child gets to stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A question that is asked once when the server is ready, its answer streamed to the terminal."""

    prompt: str
    exit_after: bool = False

    @property
    def flags(self) -> list[str]:
        """Flags of `blink chat`: greedy and bounded, because small models stray in long answers."""
        return [f"--once={self.prompt}", "--temperature=0", "--max-tokens=100"]


def run(namespace: Namespace) -> int:
    """Run engines and their frontends, as the flags say; return the exit status."""
    raise_descriptor_limit()
    if "region" not in namespace:  # several servers of one host must not meet in one region
        namespace.region = f"serve-{os.getpid()}-{secrets.token_hex(3)}"
    if namespace.exit_after_sample and not namespace.sample_prompt:
        raise ConfigError("--exit-after-sample needs --sample-prompt")
    prompt = namespace.sample_prompt
    sample = Sample(prompt=prompt, exit_after=namespace.exit_after_sample) if prompt else None
    return run_serve(build_config(ServeConfig, namespace), sample)


def run_serve(config: ServeConfig, sample: Sample | None = None) -> int:
    """Run engines and their frontends until a signal arrives; return the exit status.

    Raises:
        ConfigError: address or region are not free, the model is not there, or the options do not fit together.
    """
    set_up_logging("info", config.frontend.log_format, "blink: %(message)s")
    config = resolve_serve(config)
    if sample is not None and config.frontend.uds:
        raise ConfigError("--sample-prompt asks over TCP: it does not go with --uds")
    regions = engine_regions(config.engine.region, config.frontend.data_parallel_size)
    with ExitStack() as reserved:
        for region in regions:
            reserved.callback(Reservation(region).close)
        for region in regions:
            check_unserved(region)
            remove_unserved(region_path(region))
        return _serve(config, sample)


def _serve(config: ServeConfig, sample: Sample | None) -> int:
    # Fetched or refused once, before there are two processes to do so.
    model = localize(config.engine.model)
    resolve_model(model.model)
    config = replace(config, engine=replace(config.engine, model=model), frontend=replace(config.frontend, model=model))
    address = _listening_address(config.frontend)
    _take_signals()
    reservation = address.reserve()
    if reservation is not None:
        address = replace(address, port=reservation.getsockname()[1])
        config = replace(config, frontend=replace(config.frontend, port=address.port))
    try:
        return _Supervisor(config, address, sample).run()
    finally:
        if reservation is not None:
            reservation.close()


def resolve_serve(config: ServeConfig) -> ServeConfig:
    """Check that the two halves fit together; give every worker a queue pair.

    Raises:
        ConfigError: an option makes no sense.
    """
    workers = config.frontend_workers
    config.frontend.check_workers(workers)
    if config.engine.region != config.frontend.region:
        raise ConfigError("engine and frontends must use the same region")
    if config.frontend.data_parallel_size > 1 and config.engine.rdma_listen:
        raise ConfigError("--rdma-listen lets others in to one engine: it does not go with --data-parallel-size")
    parse_cpus(config.frontend.frontend_cpus)
    return replace(config, engine=replace(config.engine, num_queue_pairs=max(workers, config.engine.num_queue_pairs)))


def worker_config(config: ServeConfig, index: int) -> FrontendConfig:
    """Return the configuration of one frontend worker: all the same but its cores."""
    cpus = deal_cpus(parse_cpus(config.frontend.frontend_cpus), index, config.frontend_workers)
    return replace(config.frontend, frontend_cpus=format_cpus(cpus))


class _Supervisor:
    def __init__(self, config: ServeConfig, address: Address, sample: Sample | None) -> None:
        self._config = config
        self._address = address
        self._sample = sample
        self._engines = start_engines(config)
        self._frontends = [
            _child(f"frontend {index}", "frontend", *to_flags(worker_config(config, index)))
            for index in range(config.frontend_workers)
        ]
        self._asking: Child | None = None
        self._started = time.monotonic()
        self._ready = False
        self._was_ready = False
        self._status: int | None = None

    def run(self) -> int:
        """Start all, watch until told to stop, stop all; return the exit status."""
        where = self._config.frontend.uds or self._address.url
        count = len(self._engines)
        engines = "the engine" if count == 1 else f"{count} engines"
        _say(f"starting {engines} and {_count(len(self._frontends), 'frontend')} on {where}")
        for child in self._kept():
            child.start()
        while self._status is None:
            self._await_event()
            self._reap()
            self._restart_due()
            self._end_the_hung()
            self._check_ready()
        return self._stop(self._status)

    def _kept(self) -> list[Child]:
        return [*self._engines, *self._frontends]

    def _await_event(self) -> None:
        """Sleep until a signal arrives, a restart is due or the next look; note a wish to stop."""
        waits = [child.restart_at - time.monotonic() for child in self._kept() if child.restart_at is not None]
        waits.append(_LOOK_INTERVAL if self._ready else _PROBE_INTERVAL)
        if _await_signal(min(waits)) in _STOP_SIGNALS:
            _say("stopping: open requests may finish; a second signal ends them")
            self._status = 0

    def _reap(self) -> None:
        for child in self._kept():
            status = child.reap()
            if status is not None:
                self._bury(child, status)
        answered = self._asking.reap() if self._asking is not None else None
        if answered is not None:
            self._asking = None
            if self._sample is not None and self._sample.exit_after:
                self._status = answered

    def _bury(self, child: Child, status: int) -> None:
        """Plan the restart of a dead child, or give up."""
        self._ready = False
        if status == CONFIG_EXIT_STATUS:  # its own message says what to change
            self._status = status
            return
        now = time.monotonic()
        child.policy.record_death(now, now - child.started_at)
        is_needed = False
        if isinstance(child, EngineChild):
            if not (self._was_ready or child.has_booted):
                _say(f"{child.name} {describe_exit(status)} while it booted: change what its message says; giving up")
                self._status = 1
                return
            # Without its region, frontends notice in a quarter of a second instead of after the engine timeout.
            remove_unserved(child.region)
            is_needed = not any(each.serves for each in self._engines)
        _say(f"{child.name} {describe_exit(status)}")
        # Once it has worked, losing a frontend again and again costs its connections only, and losing one of several
        # engines its requests: keep on.
        if child.policy.is_exhausted and (is_needed or not self._was_ready):
            _say(f"{child.name} died {child.policy.max_deaths} times in a short time: giving up")
            self._status = 1
            return
        child.restart_at = time.monotonic() + child.policy.delay
        _say(f"starting {child.name} again" + (f" in {child.policy.delay:g} s" if child.policy.delay else ""))

    def _restart_due(self) -> None:
        for child in self._kept():
            if child.restart_at is not None and child.restart_at <= time.monotonic():
                child.start()

    def _end_the_hung(self) -> None:
        """Kill a child that lives and yet does nothing; it is buried and started again as any other."""
        now = time.monotonic()
        for engine in self._engines:
            if fault := engine.fault(now):
                self._condemn(engine, fault)
        for child in self._frontends:
            if (silent := child.heartbeat_age(now)) > self._config.frontend_timeout:
                self._condemn(child, f"has given no sign of life for {silent:.0f} s")

    def _condemn(self, child: Child, fault: str) -> None:
        if not child.is_condemned:
            threads = child.describe_threads()
            _say(f"{child.name} {fault}: ending it" + (f" (threads: {threads})" if threads else ""))
            child.is_condemned = True
            child.send(signal.SIGKILL)

    def _check_ready(self) -> None:
        if self._ready or self._status is not None or not all(child.is_running for child in self._kept()):
            return
        if not all(engine.region.exists() for engine in self._engines) or not self._address.probe():
            return
        self._ready = True
        if self._was_ready:
            _say("ready again")
            return
        self._was_ready = True
        _say(f"ready after {time.monotonic() - self._started:.1f} s; Ctrl-C stops")
        if self._sample is not None:
            _say(f"asking: {self._sample.prompt}")
            keys = [f"--api-key={key}" for key in self._config.frontend.api_key[:1]]
            self._asking = _child("the sample", "chat", f"--url={self._address.url}", *keys, *self._sample.flags)
            self._asking.start()

    def _stop(self, status: int) -> int:
        """Stop the frontends, then the engines that they need to finish; return the exit status."""
        if self._asking is not None:
            self._asking.send(signal.SIGTERM)
        drain = self._config.frontend.shutdown_timeout
        orderly = _stop_children([*self._frontends, *([self._asking] if self._asking else [])], drain + _STOP_GRACE)
        orderly = _stop_children(self._engines, _STOP_GRACE if orderly else 0.0) and orderly
        for engine in self._engines:
            remove_unserved(engine.region)  # left behind by a killed engine
        _say("stopped")
        return status if orderly else 1


def _stop_children(children: Sequence[Child], seconds: float) -> bool:
    """Ask children to stop; kill those left after `seconds` or on a second signal. Return whether none was killed."""
    deadline = time.monotonic() + seconds
    for child in children:
        child.send(signal.SIGTERM)
    hurried = False
    while any(child.is_running for child in children):
        for child in children:
            child.reap()
        left = deadline - time.monotonic()
        if not hurried and any(child.is_running for child in children):
            hurried = left <= 0 or _await_signal(left) in _STOP_SIGNALS
        if hurried:
            _kill(children)
    return not hurried


def _kill(children: Sequence[Child]) -> None:
    for child in children:
        child.send(signal.SIGKILL)
        while child.is_running and child.reap() is None:
            _await_signal(0.1)


def _take_signals() -> None:
    """Let signals wait for _await_signal(); children unblock them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_STOP_SIGNALS, signal.SIGCHLD})
    # A thread that a download has left, such as tqdm's, has not blocked them.
    for number in _STOP_SIGNALS:
        signal.signal(number, _hand_on)


def _hand_on(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as Python calls it
    """Send a signal that another thread got to the main thread, which runs this."""
    signal.pthread_kill(threading.get_ident(), number)


def _await_signal(seconds: float) -> int | None:
    """Wait for a stop signal or a child's end."""
    found = signal.sigtimedwait({*_STOP_SIGNALS, signal.SIGCHLD}, max(0.0, seconds))
    return found.si_signo if found is not None else None


def _listening_address(config: FrontendConfig) -> Address:
    return Address(host=config.host, port=config.port, uds=config.uds, tls=bool(config.ssl_certfile))


def _child(name: str, *arguments: str) -> Child:
    return Child(name, [sys.executable, "-m", "blink", *arguments])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _say(text: str) -> None:
    logger.info("%s", text)
