# SPDX-License-Identifier: Apache-2.0
"""One frontend worker: binds the port, serves until a signal, drains. Starts also when the engine is not there yet."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from blink.api.admin.rights import ADMIN_OR_KEY_PATHS, ADMIN_PATHS, STREAM_PATHS, admin_keys
from blink.api.endpoints import error_writer_of, guarded_paths
from blink.api.http.http1 import ConnectionLimits, limited_protocol
from blink.api.http.middleware import ApiKeyGuard, BodyLimit, HostGuard, Keys, RequestIds
from blink.api.observe.http_metrics import RequestCounter
from blink.api.observe.metric_store import MetricStore
from blink.api.observe.metrics import EngineMetrics, Metrics, num_values
from blink.api.observe.sequence_metrics import SequenceMetrics
from blink.api.observe.stats_line import StatsLine
from blink.api.routes import create_app
from blink.api.service import ApiService
from blink.api.serving.poller import Poller
from blink.api.serving.response_store import StoreLease, StoreLimits, open_store
from blink.config import KEY_VARIABLES, FrontendConfig
from blink.errors import ConfigError, EngineUnavailableError
from blink.host.address import Address
from blink.host.extras import how_to_install
from blink.host.heartbeat import start_beating
from blink.host.isolation import isolate, parse_cpus
from blink.host.logs import set_up_logging
from blink.link.client import ATTACH_WAIT, EngineClient
from blink.link.group import EngineGroup
from blink.link.shm import ShmConnector
from blink.region.files import engine_regions
from blink.text.assets import load_assets

if TYPE_CHECKING:
    from blink.api.observe.tracing import RequestTracer

_OWN_HOSTS = ("localhost", "127.0.0.1", "::1")
_CIPHERS = "TLSv1"  # uvicorn's own choice: what OpenSSL calls so, which is more than that version
_BACKLOG = 2048
_LEASE_GRACE = 30.0  # seconds that a request may keep this process from its event loop before it counts as hung
_HANDSHAKE_SECONDS = 5.0
_RESERVED_FILES = 64
_CLOSE_GRACE = 2  # seconds for responses that were just ended to leave

logger = logging.getLogger(__name__)


def run_worker(config: FrontendConfig) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status.

    Raises:
        ConfigError: the model's files, the address, the TLS files or the isolation asked for do not fit.
    """
    set_up_logging(config.log_level, config.log_format)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    # Before the event loop and the native poller start: their threads inherit it.
    cpus = parse_cpus(config.frontend_cpus)
    isolate(cpus, config.frontend_sched, config.frontend_sched_priority, config.frontend_mlock)
    assets = load_assets(config)
    group = EngineGroup(_clients_of(config))
    store = MetricStore(config.region, num_values(len(group.clients)))
    metrics = Metrics(store, [client.stats for client in group.clients])
    metrics.model_name = next(iter(config.model.served_model_name), "")
    tracer = _connect_tracer(config.otlp_traces_endpoint) if config.otlp_traces_endpoint else None
    stats_line = None if config.disable_log_stats else StatsLine(store, [client.stats for client in group.clients])
    poller = Poller(
        group,
        metrics,
        config.max_num_queued_reqs,
        config.max_client_share,
        observer_of=_observers(tracer),
        stats_line=stats_line,
    )
    lease, limits = _open_store(config)
    service = ApiService(config, assets, poller, tracer, limits)
    app = RequestCounter(add_middleware(create_app(service, lifespan=_lifespan(service)), config), metrics.count_http)
    listener = _bind(config)
    server = _Server(_uvicorn_config(app, config), service, _describe(config, listener))
    server.run(sockets=[listener])
    if lease is not None:
        lease.close()
    return 0


def _open_store(config: FrontendConfig) -> tuple[StoreLease | None, StoreLimits | None]:
    """Return the hold on the region's store of responses, and its limits; None where nothing is kept, or in a file."""
    if not config.response_store_size:
        return None, None
    lease = None if config.response_store_file else StoreLease(config.region)
    path = str(lease.path) if lease is not None else config.response_store_file
    limits = StoreLimits(path, config.response_store_size, config.response_store_bytes, config.max_client_share)
    open_store(limits)  # a file that is none is noticed now
    return lease, limits


def _observers(tracer: RequestTracer | None) -> Callable[[EngineMetrics], SequenceMetrics]:
    if tracer is None:
        return SequenceMetrics
    from blink.api.observe.tracing import TracedSequences

    return partial(TracedSequences, tracer=tracer)


def _connect_tracer(endpoint: str) -> RequestTracer:
    try:
        from blink.api.observe.tracing import connect_tracer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs {error.name}, which is not installed: {how_to_install('otel')}"
        ) from error
    return connect_tracer(endpoint)


def _clients_of(config: FrontendConfig) -> list[EngineClient]:
    """Return the ways to the engines: regions of this host, or one on another machine."""
    if config.rdma_engine:
        if config.data_parallel_size > 1:
            raise ConfigError("--rdma leads to one engine: it does not go with --data-parallel-size")
        from blink.link.rdma.connector import RdmaConnector  # only a frontend that uses RDMA needs its library

        connector = RdmaConnector(config.rdma_engine, config.rdma)
        return [EngineClient(connector, config.engine_timeout, lease_grace=_LEASE_GRACE)]
    regions = engine_regions(config.region, config.data_parallel_size)
    # While one engine starts, the tokens of others do not wait for it.
    wait = 0.0 if len(regions) > 1 else ATTACH_WAIT
    return [
        EngineClient(ShmConnector(region), config.engine_timeout, lease_grace=_LEASE_GRACE, attach_wait=wait)
        for region in regions
    ]


def add_middleware(app: ASGIApp, config: FrontendConfig) -> ASGIApp:
    """Return the application behind what all requests pass, the outermost last."""
    # Whoever may not stream is refused before: by the guard of keys, or as the server has no key for it.
    app = BodyLimit(app, config.max_body_bytes, error_writer_of, free=STREAM_PATHS)
    keys = Keys(
        [key for key in (*config.api_key, *map(os.environ.get, KEY_VARIABLES)) if key],
        guarded_paths(),
        admin_keys(config),
        (*ADMIN_PATHS, *ADMIN_OR_KEY_PATHS),
    )
    if keys.api or keys.admin:
        app = ApiKeyGuard(app, keys, error_writer_of)
    if config.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
        )
    names = _served_hosts(config)
    if "*" not in names:
        app = HostGuard(app, names, error_writer_of)
    if config.enable_request_id_headers:
        app = RequestIds(app)
    return app


def _served_hosts(config: FrontendConfig) -> tuple[str, ...]:
    """Return the names of the host that are served, "*" for any."""
    address = Address(host=config.host, port=config.port, uds=config.uds)
    if not config.allowed_hosts and not address.is_loopback:
        return ("*",)
    return (*_OWN_HOSTS, config.host, *config.allowed_hosts)


def _lifespan(service: ApiService):
    @asynccontextmanager
    async def run(_: FastAPI) -> AsyncIterator[None]:
        service.poller.start(service.compilation.start)  # not before: while an engine boots, it needs the cores
        start_beating(asyncio.get_running_loop())
        # What is alive now lives as long as the process: no collection need ever walk through it again.
        gc.collect()
        gc.freeze()
        yield
        service.poller.stop()
        if service.tracer is not None:
            await asyncio.to_thread(service.tracer.close)
        service.reader.close()
        service.compilation.close()

    return run


class _Server(uvicorn.Server):
    """uvicorn's server with Blink's way to stop: drain on the first signal, end at once on the second, exit 0."""

    def __init__(self, config: uvicorn.Config, service: ApiService, url: str) -> None:
        super().__init__(config)
        self._service = service
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.is_ssl:
            # uvicorn passes no such option on, and asyncio's own limit of a handshake is a minute.
            loop = asyncio.get_running_loop()
            loop.create_server = partial(loop.create_server, ssl_handshake_timeout=_HANDSHAKE_SECONDS)
        await super().startup(sockets)
        logger.info("serving on %s", self._url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not super(): it would raise the signal again at the end, and so spoil the exit status.
        del sig, frame
        self._service.is_draining = True
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timeout = self._service.config.shutdown_timeout
        num_open = self._service.poller.table.num_open
        if num_open:
            logger.info("stopping: %d sequences may finish within %g s", num_open, timeout)
        error = EngineUnavailableError("The server is shutting down.")
        timer = asyncio.get_running_loop().call_later(timeout, self._service.poller.table.fail_all, error)
        await super().shutdown(sockets)
        timer.cancel()
        self._service.poller.table.fail_all(error)


def connection_limits(config: FrontendConfig) -> ConnectionLimits:
    """Take all open files that the system grants, and leave some for other things than connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _RESERVED_FILES)
    return ConnectionLimits(min(config.max_connections or most, most), config.body_timeout)


def _uvicorn_config(app: ASGIApp, config: FrontendConfig) -> uvicorn.Config:
    if bool(config.ssl_certfile) != bool(config.ssl_keyfile):
        raise ConfigError("--ssl-certfile and --ssl-keyfile must be given together.")
    if not config.ssl_certfile and (config.ssl_ca_certs or config.ssl_cert_reqs or config.ssl_ciphers):
        raise ConfigError("--ssl-ca-certs, --ssl-cert-reqs and --ssl-ciphers need --ssl-certfile and --ssl-keyfile.")
    settings = uvicorn.Config(
        app,
        http=limited_protocol(connection_limits(config)),
        ws="none",
        loop="uvloop",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=config.keep_alive_timeout,  # pyright: ignore[reportArgumentType]  (goes to call_later)
        timeout_graceful_shutdown=int(config.shutdown_timeout) + _CLOSE_GRACE,
        ssl_certfile=config.ssl_certfile or None,
        ssl_keyfile=config.ssl_keyfile or None,
        ssl_ca_certs=config.ssl_ca_certs or None,
        ssl_cert_reqs=config.ssl_cert_reqs,
        ssl_ciphers=config.ssl_ciphers or _CIPHERS,
    )
    try:
        settings.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"cannot load the TLS files: {error}") from error
    return settings


def _bind(config: FrontendConfig) -> socket.socket:
    """Return the bound socket; workers share a TCP port by SO_REUSEPORT."""
    try:
        if config.uds:
            return _bind_unix(config.uds)
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        return listener
    except OSError as error:
        where = config.uds or f"{config.host} port {config.port}"
        raise ConfigError(f"cannot listen on {where}: {error.strerror}") from error


def _bind_unix(path: str) -> socket.socket:
    if Path(path).is_socket():  # left by a server that was killed
        Path(path).unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    return listener


def _describe(config: FrontendConfig, listener: socket.socket) -> str:
    if config.uds:
        return f"unix:{config.uds}"
    port = listener.getsockname()[1]
    return Address(host=config.host, port=port, tls=bool(config.ssl_certfile)).url
