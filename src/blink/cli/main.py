# SPDX-License-Identifier: Apache-2.0
"""The `blink` command: parses the command line and hands over; what a command needs is imported when it runs."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from blink import __version__
from blink.bench.config import BenchConfig
from blink.cli.flags import add_flags, build_config
from blink.cli.plan import PlanConfig, print_plan
from blink.cli.supervision import CONFIG_EXIT_STATUS
from blink.config import EngineConfig, FrontendConfig, ServeConfig
from blink.errors import BlinkError, ConfigError
from blink.host.extras import how_to_install
from blink.host.logs import set_up_logging
from blink.host.process import raise_descriptor_limit
from blink.quantize.config import QuantizeConfig
from blink.view.config import TopConfig, TraceConfig

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["_Parser"]

_EXAMPLES: Final = {
    "serve": """examples:
  blink serve                                  the default model on http://127.0.0.1:8000
  blink serve /models/Llama-3.1-8B-Instruct    a Hugging Face directory
  blink serve model.gguf --host 0.0.0.0 --api-key SECRET
  blink serve --frontend-workers 4 --max-num-seqs 128""",
    "engine": """example:
  blink engine --region demo &  blink frontend --region demo""",
    "frontend": """example:
  blink engine --region demo &  blink frontend --region demo --port 8080""",
    "chat": """examples:
  blink chat --system "Answer in one sentence."
  blink chat --once "What is the capital of France?" """,
    "top": """examples:
  blink top                                    the engine of this machine, also while its frontends hang
  blink top --url http://10.0.0.2:8000
  blink top --once --json | jq .token_rate""",
    "trace": """examples:
  blink trace                                  the last 4,096 steps; open blink-trace.json at ui.perfetto.dev
  blink trace --duration 10 --output busy.json""",
    "quantize": """examples:
  blink quantize /models/Llama-3.1-8B-Instruct llama-fp8
  blink quantize /models/Llama-3.1-8B-Instruct llama-int4 --format int4 --calibration answers.txt
  blink serve llama-int4""",
    "bench": """examples:
  blink bench                                  one request per second for a minute
  blink bench --request-rate 0.5,8,16,32 --client-cpus 12-15 --save-result
  blink bench --request-rate 8,32 --interference 24 --interference-cpus 0-11 --result-filename sweep.json
  blink bench --request-rate inf --num-prompts 200 --input-len 512 --output-len 64
  blink bench --base-url http://10.0.0.2:8000 --dataset-name sharegpt --dataset-path ShareGPT_V3.json""",
}

logger = logging.getLogger("blink")

_POSITIONAL: Final = dict.fromkeys(("serve", "engine", "frontend", "doctor"), " [MODEL]") | {
    "quantize": " MODEL OUTPUT"
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status (2: wrong usage or configuration)."""
    parser = build_parser()
    namespace = parser.parse_args(arguments)
    try:
        return namespace.run(namespace)
    except BlinkError as error:
        set_up_logging("info", getattr(namespace, "log_format", "text"), "blink: error: %(message)s")
        logger.error("%s", error.message)
        return CONFIG_EXIT_STATUS
    except KeyboardInterrupt:
        return 130  # as shells report SIGINT


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = _Parser(prog="blink", description="Serve large language models with no host CPU on the token path.")
    parser.add_argument("--version", action="version", version=f"blink {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve = _add_command(commands, "serve", "run an engine and its frontends on this host", _serve)
    add_flags(serve, ServeConfig, {"region": "name of the shared memory region; without it, a name of its own"})
    _add_sample_flags(serve)
    add_flags(_add_command(commands, "engine", "run the engine alone", _engine), EngineConfig)
    add_flags(_add_command(commands, "frontend", "run one frontend worker alone", _frontend), FrontendConfig)
    _add_chat_flags(_add_command(commands, "chat", "talk to a server in the terminal", _chat))
    add_flags(
        _add_command(commands, "bench", "measure a server under load, alone and beside busy neighbours", _bench),
        BenchConfig,
    )
    add_flags(_add_command(commands, "top", "watch a server: live figures in the terminal", _top), TopConfig)
    add_flags(
        _add_command(commands, "trace", "write the timeline of an engine's steps, for Perfetto", _trace), TraceConfig
    )
    quantize = _add_command(commands, "quantize", "write a model with matrices of 8 or 4 bits, calibrated", _quantize)
    quantize.add_argument("model", metavar="MODEL", help="model directory or .gguf file; '' for SmolLM2-135M-Instruct")
    quantize.add_argument("output", metavar="OUTPUT", help="directory to make, in the Hugging Face layout")
    add_flags(quantize, QuantizeConfig)
    doctor = _add_command(commands, "doctor", "say what this machine can do, and what to fix", _doctor)
    doctor.add_argument("model", nargs="?", default="", metavar="MODEL", help="say too whether this model fits")
    doctor.add_argument("--port", type=int, default=FrontendConfig().port, help="port to check (default: %(default)s)")
    add_flags(doctor, PlanConfig)
    return parser


class _Parser(argparse.ArgumentParser):
    """Refuses abbreviated flags, and reports a mistake in one line instead of all flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        print(f"blink: error: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(CONFIG_EXIT_STATUS)


def _add_command(commands: Commands, name: str, text: str, run: Callable[[argparse.Namespace], int]) -> _Parser:
    parser = commands.add_parser(
        name,
        usage=f"blink {name}{_POSITIONAL.get(name, '')} [flags]",
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=_EXAMPLES.get(name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _add_sample_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sample", "One question to show that the server works.")
    group.add_argument("--sample-prompt", metavar="TEXT", help="ask this when ready and stream the answer")
    group.add_argument("--exit-after-sample", action="store_true", help="stop after that answer")


def _add_chat_flags(parser: argparse.ArgumentParser) -> None:
    server = FrontendConfig()
    url = f"http://{server.host}:{server.port}"
    parser.add_argument("--url", default=url, help="server to talk to (default: %(default)s)")
    parser.add_argument("--model", metavar="NAME", help="model to ask; without it, the server's first")
    parser.add_argument("--system", metavar="TEXT", help="system message that opens the conversation")
    parser.add_argument("--once", metavar="TEXT", help="ask only this, print the answer and leave")
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, help="longest answer; without it, up to the model's limit"
    )
    parser.add_argument("--temperature", metavar="X", type=float, help="0 is greedy; without it, the server's default")
    parser.add_argument("--api-key", metavar="TEXT", help="key of the server; also BLINK_API_KEY")


def _serve(namespace: argparse.Namespace) -> int:
    raise_descriptor_limit()
    from blink.cli.serve import Sample, run_serve

    if "region" not in namespace:  # several servers of one host must not meet in one region
        namespace.region = f"serve-{os.getpid()}-{secrets.token_hex(3)}"
    if namespace.exit_after_sample and not namespace.sample_prompt:
        raise ConfigError("--exit-after-sample needs --sample-prompt")
    prompt = namespace.sample_prompt
    sample = Sample(prompt=prompt, exit_after=namespace.exit_after_sample) if prompt else None
    return run_serve(build_config(ServeConfig, namespace), sample)


def _engine(namespace: argparse.Namespace) -> int:
    from blink.region.files import check_unserved

    raise_descriptor_limit()
    config = build_config(EngineConfig, namespace)
    check_unserved(config.region)  # again later, but this is before torch and the model are loaded
    try:
        from blink.engine.boot import run_engine
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the engine needs {error.name}, which is not installed: {how_to_install('engine')}"
        ) from error
    set_up_logging("info", config.log_format)
    return run_engine(config)


def _frontend(namespace: argparse.Namespace) -> int:
    raise_descriptor_limit()
    from blink.api.server import run_worker

    return run_worker(build_config(FrontendConfig, namespace))


def _chat(namespace: argparse.Namespace) -> int:
    from blink.cli.chat import Server, run_chat

    key = namespace.api_key or os.environ.get("BLINK_API_KEY")
    with Server(
        namespace.url,
        model=namespace.model,
        api_key=key,
        max_tokens=namespace.max_tokens,
        temperature=namespace.temperature,
    ) as server:
        return run_chat(server, namespace.system, namespace.once)


def _bench(namespace: argparse.Namespace) -> int:
    from blink.bench.sweep import run_bench

    return run_bench(build_config(BenchConfig, namespace))


def _top(namespace: argparse.Namespace) -> int:
    from blink.view.top import run_top

    return run_top(build_config(TopConfig, namespace))


def _trace(namespace: argparse.Namespace) -> int:
    from blink.view.timeline import run_trace

    return run_trace(build_config(TraceConfig, namespace))


def _quantize(namespace: argparse.Namespace) -> int:
    try:
        from blink.quantize.conversion import quantize
    except ModuleNotFoundError as error:
        raise ConfigError(f"quantize needs {error.name}, which is not installed: {how_to_install('engine')}") from error
    set_up_logging("info", "text")
    quantize(namespace.model, namespace.output, build_config(QuantizeConfig, namespace))
    return 0


def _doctor(namespace: argparse.Namespace) -> int:
    from blink.cli.doctor import run_doctor

    plan = build_config(PlanConfig, namespace)
    if plan.plan:
        print_plan(namespace.model, plan)
        return 0
    return run_doctor(namespace.port, namespace.model)
