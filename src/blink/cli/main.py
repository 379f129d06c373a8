# SPDX-License-Identifier: Apache-2.0
"""The `blink` command: parses the command line and hands over; what a command needs is imported when it runs."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from blink.cli.completion import SHELLS, complete
from blink.cli.flag_help import describe_topic, find_topic
from blink.cli.flags import add_flags, build_config
from blink.cli.loading import load
from blink.cli.supervision import CONFIG_EXIT_STATUS
from blink.config import FrontendConfig, ServeConfig
from blink.errors import BlinkError, ConfigError
from blink.host.logs import set_up_logging

_EXAMPLES: Final = {
    "serve": """examples:
  blink serve                                  the default model on http://127.0.0.1:8000
  blink serve Qwen/Qwen3-8B                    from the Hugging Face hub
  blink serve unsloth/Qwen3-0.6B-GGUF:Q4_K_M   one GGUF file of a repository
  blink serve /models/Llama-3.1-8B-Instruct    a Hugging Face directory
  blink serve model.gguf --host 0.0.0.0 --api-key SECRET
  blink serve --frontend-workers 4 --max-num-seqs 128""",
    "quickstart": """examples:
  blink quickstart                             print the first steps
  blink quickstart --run                       do them""",
    "completion": """examples:
  eval "$(blink completion bash)"              in ~/.bashrc; for zsh in ~/.zshrc, after compinit
  blink completion fish | source               in ~/.config/fish/config.fish""",
    "pull": """examples:
  blink pull Qwen/Qwen3-8B
  blink pull unsloth/Qwen3-0.6B-GGUF:Q4_K_M""",
    "rm": """example:
  blink rm Qwen/Qwen3-8B""",
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


@dataclass(frozen=True, slots=True)
class Command:
    """A command: what it is for, what runs it, and its flags."""

    help: str
    module: str
    function: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    config: str = ""  # the class of what the function takes; without it, the parsed flags themselves
    positional: str = ""
    takes_vllm: bool = False  # the flags of `vllm serve` too

    def run(self, namespace: argparse.Namespace) -> int:
        """Load what the command needs, and run it."""
        function = getattr(load(self.module, f"blink {namespace.command}"), self.function)
        return function(build_config(_find_class(self.config), namespace) if self.config else namespace)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status (2: wrong usage or configuration)."""
    if "_ARGCOMPLETE" in os.environ:  # a shell asks, by the script of `blink completion`
        complete(make_parsers()[0])
    namespace = parse(sys.argv[1:] if arguments is None else arguments)
    log_format = getattr(namespace, "log_format", "text")
    try:
        if namespace.ignored:
            set_up_logging("info", log_format, "blink: %(message)s")
            logger.info("these flags have no effect here: %s", "; ".join(namespace.ignored))
        return COMMANDS[namespace.command].run(namespace)
    except BlinkError as error:
        set_up_logging("info", log_format, "blink: error: %(message)s")
        logger.error("%s", error.message)
        return CONFIG_EXIT_STATUS
    except KeyboardInterrupt:
        return 130  # as shells report SIGINT


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command and its flags, vLLM's as Blink's own; a mistake ends the process with one line."""
    words, ignored = list(arguments), list[str]()
    parser, parsers = make_parsers(words[0] if words and words[0] in COMMANDS else "")
    if words and words[0] in COMMANDS and (topic := find_topic(words)) is not None:
        _show_help(parsers[words[0]], topic)
    if words and words[0] in COMMANDS and COMMANDS[words[0]].takes_vllm:
        chosen = parsers[words[0]]
        try:
            line = load("blink.cli.command_line").translate(words[1:], chosen._option_string_actions)
        except ConfigError as error:
            chosen.error(error.message)
        words, ignored = [words[0], *line.words], line.ignored
    namespace = parser.parse_args(words)
    namespace.ignored = ignored
    return namespace


def _show_help(parser: argparse.ArgumentParser, topic: str) -> NoReturn:
    text = describe_topic(parser, topic)
    if text is None:
        parser.error(f"--help={topic}: there is no such group or flag; --help=listgroup lists the groups")
    print(text, end="")
    sys.exit()


def make_parsers(only: str = "") -> tuple[_Parser, dict[str, _Parser]]:
    """Return the parser of the command line, and those of its commands; only: the one command that needs its flags."""
    parser = _Parser(prog="blink", description="Serve large language models with no host CPU on the token path.")
    parser.add_argument("--version", action=_PrintVersions, nargs=0, help="print the versions and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="command")
    parsers = {name: _add_command(commands, name, command) for name, command in COMMANDS.items()}
    for name in [only] if only else COMMANDS:
        _add_flags(parsers[name], COMMANDS[name])
    return parser, parsers


class _Parser(argparse.ArgumentParser):
    """Refuses abbreviated flags, and reports a mistake in one line instead of all flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        print(f"blink: error: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(CONFIG_EXIT_STATUS)


class _PrintVersions(argparse.Action):
    """Print the versions and end the process."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(load("blink.cli.versions").describe_versions())
        parser.exit()


def _add_command(commands: argparse._SubParsersAction[_Parser], name: str, command: Command) -> _Parser:
    return commands.add_parser(
        name,
        usage=f"blink {name}{command.positional} [flags]",
        help=command.help,
        description=command.help[0].upper() + command.help[1:] + ".",
        epilog=_EXAMPLES.get(name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_flags(parser: argparse.ArgumentParser, command: Command) -> None:
    command.add_flags(parser)
    if command.takes_vllm:
        parser.add_argument("--config", metavar="FILE", help="YAML file of flags; the command line wins over it")


def _find_class(name: str) -> type:
    """Return the class of a dotted name; other commands need not load its module."""
    module, _, own = name.rpartition(".")
    return getattr(load(module), own)


def _flags_of(config: str) -> Callable[[argparse.ArgumentParser], None]:
    return lambda parser: add_flags(parser, _find_class(config))


def _add_serve_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, ServeConfig, {"region": "name of the shared memory region; without it, a name of its own"})
    group = parser.add_argument_group("sample", "One question to show that the server works.")
    group.add_argument("--sample-prompt", metavar="TEXT", help="ask this when ready and stream the answer")
    group.add_argument("--exit-after-sample", action="store_true", help="stop after that answer")


def _add_quantize_flags(parser: argparse.ArgumentParser) -> None:
    text = "name on the hub, model directory or .gguf file; '' for SmolLM2-135M-Instruct"
    parser.add_argument("model", metavar="MODEL", help=text)
    parser.add_argument("output", metavar="OUTPUT", help="directory to make, in the Hugging Face layout")
    add_flags(parser, _find_class("blink.quantize.config.QuantizeConfig"))


def _add_doctor_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="", metavar="MODEL", help="say too whether this model fits")
    parser.add_argument("--port", type=int, default=FrontendConfig().port, help="port to check (default: %(default)s)")
    add_flags(parser, _find_class("blink.cli.plan.PlanConfig"))


def _add_quickstart_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", action="store_true", help="do the steps, instead of printing them")
    port = FrontendConfig().port
    parser.add_argument("--port", type=int, default=port, help="port to serve on (default: %(default)s)")


def _add_completion_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="shell to make the script for")


def _add_pull_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="name on the hub: org/name, or org/name:Q4_K_M for a GGUF file")
    parser.add_argument("--hf-token", metavar="TEXT", default="", help="token for the hub; without it, HF_TOKEN")
    _add_revision(parser)
    _add_list_flags(parser)


def _add_rm_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="name on the hub: org/name")
    _add_revision(parser)
    _add_list_flags(parser)


def _add_revision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", metavar="TEXT", default="", help="branch, tag or commit")


def _add_list_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--download-dir", metavar="TEXT", default="", help="folder of models; without it, HF_HOME's")


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
    parser.add_argument("--api-key", metavar="TEXT", help="key of the server; also BLINK_API_KEY, VLLM_API_KEY")


COMMANDS: Final[Mapping[str, Command]] = {
    "serve": Command(
        "run an engine and its frontends on this host",
        "blink.cli.serve",
        "run",
        _add_serve_flags,
        positional=" [MODEL]",
        takes_vllm=True,
    ),
    "engine": Command(
        "run the engine alone",
        "blink.cli.engine",
        "run",
        _flags_of("blink.config.EngineConfig"),
        positional=" [MODEL]",
        takes_vllm=True,
    ),
    "frontend": Command(
        "run one frontend worker alone",
        "blink.cli.frontend",
        "run",
        _flags_of("blink.config.FrontendConfig"),
        positional=" [MODEL]",
        takes_vllm=True,
    ),
    "pull": Command(
        "download a model from the Hugging Face hub", "blink.cli.models", "run_pull", _add_pull_flags, "", " MODEL"
    ),
    "list": Command("list the downloaded models", "blink.cli.models", "run_list", _add_list_flags),
    "rm": Command("remove a downloaded model", "blink.cli.models", "run_rm", _add_rm_flags, "", " MODEL"),
    "chat": Command("talk to a server in the terminal", "blink.cli.chat", "run", _add_chat_flags),
    "bench": Command(
        "measure a server under load, alone and beside busy neighbours",
        "blink.bench.sweep",
        "run_bench",
        _flags_of("blink.bench.config.BenchConfig"),
        "blink.bench.config.BenchConfig",
    ),
    "top": Command(
        "watch a server: live figures in the terminal",
        "blink.view.top",
        "run_top",
        _flags_of("blink.view.config.TopConfig"),
        "blink.view.config.TopConfig",
    ),
    "trace": Command(
        "write the timeline of an engine's steps, for Perfetto",
        "blink.view.timeline",
        "run_trace",
        _flags_of("blink.view.config.TraceConfig"),
        "blink.view.config.TraceConfig",
    ),
    "quantize": Command(
        "write a model with matrices of 8 or 4 bits, calibrated",
        "blink.cli.quantize",
        "run",
        _add_quantize_flags,
        positional=" MODEL OUTPUT",
    ),
    "doctor": Command(
        "say what this machine can do, and what to fix",
        "blink.cli.doctor",
        "run",
        _add_doctor_flags,
        positional=" [MODEL]",
    ),
    "quickstart": Command("show the first steps, or do them", "blink.cli.quickstart", "run", _add_quickstart_flags),
    "completion": Command(
        "print a script that lets a shell complete commands and flags",
        "blink.cli.completion",
        "run",
        _add_completion_flags,
        positional=" SHELL",
    ),
}
