# SPDX-License-Identifier: Apache-2.0
"""The options of `blink bench`: frozen dataclasses whose fields become flags, with the names of `vllm bench serve`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Final

from blink.config import FrontendConfig, option, require
from blink.errors import ConfigError

METRICS: Final = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The server to measure."""

    base_url: str = option("", "its URL, such as https://example.com:8443; empty: http with --host and --port")
    host: str = option(FrontendConfig().host, "its host")
    port: int = option(FrontendConfig().port, "its port")
    endpoint: str = option("/v1/completions", "path of its completions API")
    model: str = option("", "model to ask; empty: the server's first")
    api_key: str = option("", "key of the server; also BLINK_API_KEY, VLLM_API_KEY")
    extra_body: str = option("{}", "JSON object whose fields every request gets", metavar="JSON")
    request_timeout: float = option(600.0, "seconds after which an answer that is not complete has failed")

    def __post_init__(self) -> None:
        require(self, "port", 1, 65535)
        require(self, "request_timeout", 0.001)

    @property
    def url(self) -> str:
        """The URL without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.base_url.rstrip("/") or f"http://{host}:{self.port}"

    @property
    def extra_fields(self) -> dict[str, Any]:
        """The fields that every request gets.

        Raises:
            ConfigError: --extra-body is no JSON object.
        """
        try:
            fields = json.loads(self.extra_body)
        except ValueError as error:
            raise ConfigError(f"--extra-body is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError("--extra-body must be a JSON object")
        return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """What is sent, and when."""

    request_rate: str = option("1", "requests per second; a list such as 0.5,8,16; inf: all at once", metavar="LIST")
    duration: float = option(60.0, "seconds in which requests of one rate are sent; --num-prompts goes before it")
    num_prompts: int = option(0, "requests of one rate; 0: as many as --duration holds")
    dataset_name: str = option(
        "lognormal",
        "lengths of prompts and answers; lognormal: like ShareGPT's; random: fixed; sharegpt: from --dataset-path; "
        "chat, json, edit, quotes: chats of one kind that ship with Blink",
        choices=("lognormal", "random", "sharegpt", "chat", "json", "edit", "quotes"),
    )
    dataset_path: str = option("", "ShareGPT's JSON file")
    mean_input_len: int = option(185, "lognormal: mean tokens of a prompt")
    mean_output_len: int = option(215, "lognormal: mean tokens of an answer")
    random_input_len: int = option(1024, "random: tokens of a prompt")
    random_output_len: int = option(128, "random: tokens of an answer")
    flex_request_rate: float = option(
        0.0, "requests per second of a second load of service_tier flex, sent together with each rate"
    )
    flex_input_len: int = option(0, "tokens of each of its prompts; 0: log-normal as the data set")
    flex_output_len: int = option(0, "tokens of each of its answers; 0: likewise")
    flex_service_tier: str = option(
        "flex", "tier of the second load; default: the same load in one class", choices=("flex", "default")
    )
    input_len: int = option(0, "tokens of every prompt, whatever the data set; 0: the data set's")
    output_len: int = option(0, "tokens of every answer, whatever the data set; 0: the data set's")
    max_model_len: int = option(0, "longest prompt plus answer; 0: as the server says")
    prompt_format: str = option("tokens", "how prompts are sent", choices=("tokens", "text"))
    vocab_size: int = option(30000, "token ids of made-up prompts are smaller than this")
    temperature: float = option(0.0, "temperature of sampling; 0 is greedy")
    ignore_eos: bool = option(True, "let answers have the length asked for")
    num_warmups: int = option(3, "requests before the first measurement, not counted")
    seed: int = option(0, "seed of arrivals, lengths and prompts")

    def __post_init__(self) -> None:
        for name in ("mean_input_len", "mean_output_len", "random_input_len", "random_output_len"):
            require(self, name, 1)
        for name in (
            "flex_request_rate",
            "flex_input_len",
            "flex_output_len",
            "num_prompts",
            "input_len",
            "output_len",
            "max_model_len",
            "num_warmups",
            "temperature",
            "seed",
        ):
            require(self, name, 0)
        require(self, "duration", 0.001)
        require(self, "vocab_size", 1000)

    @property
    def rates(self) -> list[float]:
        """The request rates, in their order.

        Raises:
            ConfigError: not a list of positive numbers, or inf without a number of requests.
        """
        try:
            rates = [float(part) for part in self.request_rate.split(",")]
        except ValueError as error:
            raise ConfigError(f"--request-rate {self.request_rate}: write numbers such as 0.5,8,16 or inf") from error
        if not all(rate > 0 for rate in rates):
            raise ConfigError(f"--request-rate {self.request_rate}: rates must be more than 0")
        if math.inf in rates and not self.num_prompts:
            raise ConfigError("--request-rate inf needs --num-prompts")
        return rates


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceConfig:
    """Busy neighbours: each rate is measured without and with them. Run them on the server's host."""

    interference: int = option(0, "processes that keep the CPUs busy: half compute, half copy 256 MiB buffers")
    interference_cpus: str = option("", "cores of these processes, such as 0-11; empty: any", metavar="LIST")

    def __post_init__(self) -> None:
        require(self, "interference", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """The load generator itself."""

    client_processes: int = option(1, "processes that send, when one is too slow")
    client_cpus: str = option("", "cores of these processes, such as 12-15; empty: any", metavar="LIST")

    def __post_init__(self) -> None:
        require(self, "client_processes", 1, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageConfig:
    """What the server uses of this host, where it runs on this host."""

    gpu: str = option("0", "indices of the server's GPUs, whose energy is read, as nvidia-smi counts", metavar="LIST")
    server_pids: str = option(
        "", "process ids of the server: its CPU time is counted, with that of its children", metavar="LIST"
    )

    @property
    def gpus(self) -> list[int]:
        """The indices of the GPUs.

        Raises:
            ConfigError: not a list of numbers.
        """
        return _read_list(self.gpu, "--gpu")

    @property
    def pids(self) -> list[int]:
        """The process ids.

        Raises:
            ConfigError: not a list of numbers.
        """
        return _read_list(self.server_pids, "--server-pids")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultConfig:
    """What is printed and saved."""

    percentile_metrics: str = option(",".join(METRICS), "latencies in the table", metavar="LIST")
    metric_percentiles: str = option("50,90,99", "percentiles in the table", metavar="LIST")
    save_result: bool = option(False, "save a JSON file and a page with plots")
    save_detailed: bool = option(False, "save the times of every request and event too")
    result_dir: str = option("", "directory of the files; empty: the current one; given, it implies --save-result")
    result_filename: str = option("", "name of the JSON file; given, it implies --save-result")

    @property
    def metrics(self) -> list[str]:
        """The latencies to show.

        Raises:
            ConfigError: an unknown name.
        """
        names = [name.strip() for name in self.percentile_metrics.split(",")]
        if unknown := sorted(set(names) - set(METRICS)):
            raise ConfigError(f"--percentile-metrics: unknown {', '.join(unknown)}; choose of {', '.join(METRICS)}")
        return names

    @property
    def percentiles(self) -> list[float]:
        """The percentiles to show.

        Raises:
            ConfigError: not numbers from 0 to 100.
        """
        try:
            percentiles = [float(part) for part in self.metric_percentiles.split(",")]
        except ValueError as error:
            raise ConfigError("--metric-percentiles: write numbers such as 50,99") from error
        if not all(0 <= percentile <= 100 for percentile in percentiles):
            raise ConfigError("--metric-percentiles must be between 0 and 100")
        return percentiles


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """One sweep over request rates."""

    server: ServerConfig = field(default_factory=ServerConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    interference: InterferenceConfig = field(default_factory=InterferenceConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    usage: UsageConfig = field(default_factory=UsageConfig)
    result: ResultConfig = field(default_factory=ResultConfig)


def _read_list(text: str, flag: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: write numbers such as 0,1") from error
