# SPDX-License-Identifier: Apache-2.0
"""All configuration: frozen dataclasses whose fields become the command's flags (vLLM's names where it has one)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from blink.errors import ConfigError
from blink.kv_events import KvEvents, read_kv_events
from blink.kv_offload import OffloadConfig
from blink.lora_config import LoraConfig, allows_updating
from blink.message_formats import CALL_FORMATS, REASONING_FORMATS
from blink.option import option, parse_object, require
from blink.rdma_config import RdmaConfig
from blink.speculation import Speculation, read_speculation

KEY_VARIABLES = ("BLINK_API_KEY", "VLLM_API_KEY")  # each holds an API key
FITTING_LENGTH = -1  # of --max-model-len: as many tokens as the KV cache has room for
FITTING_RANKS = 0  # of --tensor-parallel-size: as few GPUs as hold the model
MAX_TPOT_TARGET_MS = 10_000  # as csrc/region/layout.h has it
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "bfloat16", "float16")


def key_of_environment() -> str:
    """Return the API key that the environment holds, or nothing."""
    return next(filter(None, map(os.environ.get, KEY_VARIABLES)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model to load and how."""

    model: str = option(
        "",
        "name on the Hugging Face hub (org/name, org/name:Q4_K_M), model directory or .gguf file; empty: "
        "SmolLM2-135M-Instruct",
    )
    revision: str = option("", "branch, tag or commit of a model on the hub; empty: main")
    hf_token: str = option("", "token for the hub; empty: HF_TOKEN, or that of `hf auth login`")
    download_dir: str = option("", "folder for models from the hub; empty: the hub's own cache, below HF_HOME")
    tokenizer: str = option("", "tokenizer: a name on the hub, a directory or a .gguf file; empty: the model's own")
    tokenizer_revision: str = option("", "branch, tag or commit of a tokenizer on the hub; empty: main")
    skip_tokenizer_init: bool = option(False, "load no tokenizer: prompts are token ids, answers have no text")
    served_model_name: tuple[str, ...] = option(
        (), "names in the API, the first of which is shown; may be given several times; without it derived from MODEL"
    )
    load_format: str = option("auto", "where weights come from", choices=("auto", "safetensors", "gguf", "dummy"))
    dtype: str = option(
        "auto",
        "compute type; auto: bfloat16 on GPU, float32 on CPU, with a GGUF file's matrices as they are stored",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = option(
        "auto",
        "auto: matrices as the model has them; fp8: rounded to FP8 when loaded; else the method that the model names",
        metavar="auto|fp8|METHOD",
    )
    kv_cache_dtype: str = option(
        "auto",
        "type of the KV cache; auto: the compute type, or float16 on a CPU with --dtype auto; fp8 (e4m3): 8 bits, with "
        "the checkpoint's scales; bfloat16, float16: only if that is the compute type",
        choices=KV_CACHE_DTYPES,
    )
    per_layer_embeddings: str = option(
        "auto", "memory of Gemma 4's per-layer table; auto: the GPU's if it fits", choices=("auto", "gpu", "host")
    )
    max_model_len: int = option(
        0,
        "longest prompt plus output in tokens; 0: the model's own limit; auto or -1: the same, or as much as fits the "
        "KV cache",
    )
    hf_overrides: str = option(
        "", "JSON object that replaces parts of config.json, such as rope_scaling", metavar="JSON"
    )
    generation_config: str = option(
        "auto",
        "source of default sampling parameters; auto: the model; vllm: none; else a folder",
        metavar="auto|vllm|DIR",
    )
    override_generation_config: str = option("", "JSON object of default sampling, such as temperature", metavar="JSON")
    runner: str = option("auto", "what the model does; auto: as its files say", choices=("auto", "generate", "pooling"))
    convert: str = option("auto", "what a model pools for", choices=("auto", "none", "embed", "classify"))
    pooler_config: str = option("", "JSON object: pooling_type (LAST, MEAN, CLS), normalize", metavar="JSON")
    seed: int = option(0, "seed of dummy weights, and of sampling where requests give none; 0: that differs each time")

    def __post_init__(self) -> None:
        require(self, "max_model_len", FITTING_LENGTH)
        for name in ("hf_overrides", "override_generation_config", "pooler_config"):
            parse_object(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Size and policy of one engine."""

    model: ModelConfig = field(default_factory=ModelConfig)
    rdma_listen: str = option("", "control port of RDMA, for frontends of other machines", metavar="HOST:PORT")
    rdma: RdmaConfig = field(default_factory=RdmaConfig)
    region: str = option("blink", "name of the shared memory region that joins frontends and engine")
    device: str = option("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    max_num_seqs: int = option(256, "sequences that run at once")
    max_num_batched_tokens: int = option(
        0, "tokens of one step, prompt chunks included; 0: 2048 on GPU, 256 on CPU, or --max-num-seqs if that is more"
    )
    tensor_parallel_size: int = option(
        1, "ranks that share a layer; on the CPU threads; auto: as few GPUs as it fits", words={"auto": FITTING_RANKS}
    )
    block_size: int = option(16, "tokens per KV cache block", choices=(8, 16, 32, 64))
    num_gpu_blocks_override: int = option(0, "KV cache blocks; 0: from the memory options")
    kv_cache_memory_bytes: int = option(0, "KV cache size; 0: 512 MiB on CPU, from --gpu-memory-utilization on GPU")
    gpu_memory_utilization: float = option(0.92, "share of GPU memory to use")
    enable_prefix_caching: bool = option(True, "reuse the KV cache of equal prompt prefixes")
    scheduling_policy: str = option("fcfs", "order of requests within a class", choices=("fcfs", "priority"))
    max_queue_age: float = option(30.0, "seconds after which a waiting request goes before all classes and priorities")
    step_target_ms: float = option(
        0.0,
        "longest time of a step that decodes and also takes prompt tokens; 0: 15/8 of the time of decoding alone "
        "(CPU: 3/2), or up to 8 times, if prompt tokens then cost least",
    )
    urgent_tpot_target_ms: float = option(
        0.0, "time between tokens that latency-sensitive requests keep under best-effort load; 0: no target"
    )
    tpot_target_ms: float = option(
        0.0, "time per output token of requests that set none; steps wait for it to save energy; 0: none"
    )
    best_effort_share: float = option(0.1, "least share of the time for best-effort requests, under any load")
    segment_ms: float = option(0.0, "length of a segment, after which a step may be preempted; 0: 1 on GPU, 10 on CPU")
    overtake_share: float = option(
        0.01, "largest share of the time that prompts take from decoding by preempting decode steps; 0: none does"
    )
    kv_offload: OffloadConfig = field(default_factory=OffloadConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    speculative_config: str = option("", "JSON object of speculative decoding: docs/speculation.md", metavar="JSON")
    kv_events_config: str = option("", "JSON object of KV cache events: docs/kv-events.md", metavar="JSON")
    num_queue_pairs: int = option(4, "frontend workers that may attach")
    max_sequences_per_worker: int = option(4096, "sequences (running or waiting) of one frontend worker")
    prompt_arena_bytes: int = option(0, "prompt memory of each frontend worker; 0: 8 MiB or four longest prompts")
    lease_timeout: float = option(5.0, "seconds without a sign of life after which a frontend's sequences are dropped")
    stall_timeout: float = option(30.0, "seconds until a frontend that reads no completions loses its sequences")
    enable_sleep_mode: bool = option(False, "let an engine on a GPU sleep: docs/pause.md; one on a CPU always may")
    deterministic: bool = option(False, "same bits whatever else runs: docs/deterministic.md; VLLM_BATCH_INVARIANT=1")
    cpu_threads: int = option(0, "threads of the CPU engine; 0: OMP_NUM_THREADS, or all cores")
    cpu_gemm: str = option("auto", "of GGUF files; int16: rounds, on VNNI", choices=("auto", "float32", "int16"))
    cpu_prompt_gemm: str = option("same", "of prompts; bfloat16: rounds, on AMX", choices=("same", "bfloat16"))
    log_format: str = option("text", "form of log lines; json: one object a line", choices=("text", "json"))

    @property
    def speculation(self) -> Speculation:
        """What --speculative-config says."""
        return read_speculation(parse_object("speculative_config", self.speculative_config))

    @property
    def kv_events(self) -> KvEvents:
        """What events of the KV cache are published."""
        return read_kv_events(parse_object("kv_events_config", self.kv_events_config))

    @property
    def sizes(self) -> dict[str, int]:
        """The fields of a geometry that its parts say."""
        return {**self.lora.sizes, **self.kv_events.sizes}

    @property
    def has_ranks(self) -> bool:
        """Whether several devices, or threads, have parts of the model."""
        return self.tensor_parallel_size > 1

    @property
    def has_larger_steps(self) -> bool:
        """Whether some steps do more than others: for rows with adapters, or to guess what follows rows."""
        return self.lora.enable_lora or self.speculation.has_head

    def __post_init__(self) -> None:
        require(self, "max_num_seqs", 1)
        require(self, "tensor_parallel_size", FITTING_RANKS, 64)
        _ = self.speculation, self.kv_events  # which say what is wrong with them
        names = "max_num_batched_tokens num_gpu_blocks_override kv_cache_memory_bytes prompt_arena_bytes cpu_threads"
        require(self, names, 0)
        require(self, "gpu_memory_utilization", 0.01, 1)
        require(self, "num_queue_pairs", 1, 64)
        require(self, "max_sequences_per_worker", 1, 1 << 16)
        require(self, "lease_timeout stall_timeout", 0.5, 3600)
        require(self, "max_queue_age step_target_ms urgent_tpot_target_ms segment_ms", 0, 1e6)
        require(self, "tpot_target_ms", 0, MAX_TPOT_TARGET_MS)
        require(self, "best_effort_share", 0.001, 1)
        require(self, "overtake_share", 0, 1)
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            told = f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs"
            raise ConfigError(f"{told} ({self.max_num_seqs}): every running sequence takes a token in each step")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """One HTTP frontend worker."""

    model: ModelConfig = field(default_factory=ModelConfig)
    rdma_engine: str = option(
        "", "use an engine on another machine: its --rdma-listen address", metavar="HOST:PORT", flag="rdma"
    )
    rdma: RdmaConfig = field(default_factory=RdmaConfig)
    region: str = option("blink", "name of the engine's shared memory region")
    lora: LoraConfig = field(default_factory=LoraConfig)
    lora_modules: tuple[str, ...] = option(
        (), "adapter to serve, as NAME=PATH or a JSON object of name and path; may be given several times"
    )
    allow_runtime_lora_updating: bool = option(
        False, "let clients with an API key load and unload adapters; also VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    )
    data_parallel_size: int = option(
        1, "engines with the whole model at one port, each on a GPU of its own; their regions: NAME.dp0, NAME.dp1"
    )
    host: str = option("127.0.0.1", "address to listen on (0.0.0.0 for all)")
    port: int = option(8000, "port to listen on")
    uds: str = option("", "listen on this Unix socket instead of host and port")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "further host name that clients may use, * for any; may be given several times; without it, only a server on "
        "a loopback address checks",
    )
    api_key: tuple[str, ...] = option(
        (),
        "key that clients must send as Bearer token or x-api-key; may be given several times; also BLINK_API_KEY, "
        "VLLM_API_KEY",
    )
    admin_api_key: tuple[str, ...] = option(
        (),
        "key of those who may pause and change the server, as --api-key takes them; may be given several times; also "
        "BLINK_ADMIN_API_KEY",
    )
    enable_admin_endpoints: bool = option(
        False, "let clients with an admin key pause the engine (docs/pause.md); also VLLM_SERVER_DEV_MODE=1"
    )
    allowed_origins: tuple[str, ...] = option((), "CORS: allowed origins; none by default")
    allowed_methods: tuple[str, ...] = option(("*",), "CORS: allowed methods")
    allowed_headers: tuple[str, ...] = option(("*",), "CORS: allowed headers")
    allow_credentials: bool = option(False, "CORS: allow credentials")
    max_body_bytes: int = option(32 << 20, "largest accepted request body")
    max_bodies_bytes: int = option(256 << 20, "memory for all bodies that a worker receives or reads; 503 beyond")
    body_timeout: float = option(30.0, "seconds for a request's body, and one more for each 16 KiB of it; 408 beyond")
    max_connections: int = option(0, "connections of a worker; 0: as many as its limit of open files permits")
    max_tokenize_chars: int = option(1 << 20, "longest text of /tokenize; /detokenize takes a quarter as many ids")
    response_store_size: int = option(
        1000, "responses that /v1/responses keeps for later requests, the newest ones; 0: none"
    )
    response_store_bytes: int = option(128 << 20, "memory for all responses that are kept")
    response_store_file: str = option(
        "", "keep responses in this file, also over restarts; empty: in shared memory, until the last frontend ends"
    )
    prefix_cache_isolation: str = option(
        "key",
        "which requests share cached prefixes; key: those of one API key; none: all, so hits reveal others' prompts",
        choices=("key", "none"),
    )
    max_client_share: float = option(
        0.5, "share of a worker's sequences that one client (API key, else address) may hold; 429 beyond"
    )
    max_num_queued_reqs: int = option(
        0, "waiting requests of a worker before it answers 503; 0: as many as the engine holds"
    )
    page: bool = option(True, "serve a page with a chat and the server's live state at /")
    chat_template: str = option(
        "", "Jinja chat template for all chats: a file, the text itself, or the name of one of the model's templates"
    )
    trust_request_chat_template: bool = option(False, "let requests bring a chat template; it runs in a sandbox")
    default_chat_template_kwargs: str = option(
        "",
        'JSON object of variables for all chats, such as {"enable_thinking": false}; those of a request win',
        metavar="JSON",
    )
    return_tokens_as_token_ids: bool = option(False, "name tokens in logprobs by their ids, as token_id:5")
    enable_force_include_usage: bool = option(False, "put usage into each chunk of every stream, and at its end")
    enable_per_request_metrics: bool = option(False, "tell in answers, or with a stream's usage, what times they took")
    enable_tokenizer_info_endpoint: bool = option(False, "answer /tokenizer_info with the tokenizer's configuration")
    enable_auto_tool_choice: bool = option(True, "let the model decide whether it calls tools")
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls; auto: as its chat template says",
        choices=("auto", *CALL_FORMATS.split()),
    )
    reasoning_parser: str = option(
        "auto",
        "how the model marks its reasoning, which then is apart from the answer; auto: as its chat template says",
        choices=("auto", "none", *REASONING_FORMATS),
    )
    engine_timeout: float = option(3.0, "seconds without engine heartbeat after which open requests fail")
    shutdown_timeout: float = option(30.0, "seconds to finish open requests after SIGTERM")
    keep_alive_timeout: float = option(5.0, "seconds that an HTTP connection may idle, or take over a request's head")
    ssl_certfile: str = option("", "TLS certificate file")
    ssl_keyfile: str = option("", "TLS key file")
    ssl_ca_certs: str = option("", "certificates of the authorities that clients' certificates are checked by")
    ssl_cert_reqs: int = option(
        0, "clients' certificates: 0: not asked for, 1: checked if sent, 2: required", choices=(0, 1, 2)
    )
    ssl_ciphers: str = option("", "TLS cipher suites up to TLS 1.2, in OpenSSL's form; empty: the library's choice")
    enable_request_id_headers: bool = option(False, "answer with X-Request-Id")
    log_format: str = option("text", "form of log lines; json: one object a line", choices=("text", "json"))
    log_level: str = option("info", "log level", choices=("debug", "info", "warning", "error"))
    enable_log_requests: bool = option(False, "log each request's parameters, end and duration (never its text)")
    disable_log_stats: bool = option(False, "write no line of throughput and load every ten seconds")
    enable_log_timings: bool = option(False, "log when each streamed request was received, submitted, first answered")
    otlp_traces_endpoint: str = option(
        "", "collector that gets a span of each sequence by OpenTelemetry, such as http://localhost:4318", metavar="URL"
    )
    frontend_cpus: str = option(
        "", "cores of the frontends, such as 2,3 or 2-5, dealt among workers; empty: any", metavar="LIST"
    )
    frontend_sched: str = option(
        "other", "scheduling class; fifo and rr run before every ordinary process", choices=("other", "fifo", "rr")
    )
    frontend_sched_priority: int = option(50, "priority within fifo and rr, from 1 to 99")
    frontend_mlock: bool = option(False, "lock the frontends' memory: it is never paged out")

    def __post_init__(self) -> None:
        require(self, "port", 0, 65535)
        require(self, "data_parallel_size", 1, 64)
        require(self, "frontend_sched_priority", 1, 99)
        parse_object("default_chat_template_kwargs", self.default_chat_template_kwargs)
        require(self, "max_num_queued_reqs max_connections response_store_size response_store_bytes", 0)
        require(self, "shutdown_timeout keep_alive_timeout", 0)
        require(self, "max_body_bytes max_bodies_bytes max_tokenize_chars", 1)
        require(self, "body_timeout", 0.1, 3600)
        require(self, "max_client_share", 0.001, 1)
        require(self, "engine_timeout", 0.5, 3600)

    def check_workers(self, count: int) -> None:
        """Refuse what does not go with so many workers.

        Raises:
            ConfigError: an option is for fewer workers or engines.
        """
        if count > 1 and self.uds:
            raise ConfigError("--uds serves one frontend: several cannot share a Unix socket")
        updates = allows_updating(self.allow_runtime_lora_updating)
        self.lora.check_workers(count, self.data_parallel_size, updates=updates)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """One engine and its frontends on this host."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    frontend: FrontendConfig = field(default_factory=FrontendConfig)
    frontend_workers: int = option(1, "frontend processes that share the port")
    frontend_timeout: float = option(3.0, "seconds without a sign of life after which a frontend is started again")

    def __post_init__(self) -> None:
        require(self, "frontend_workers", 1, 64)
        require(self, "frontend_timeout", 1, 3600)
        if self.frontend.rdma_engine:
            raise ConfigError("--rdma is for `blink frontend`: the frontends of `blink serve` are on the engine's host")
