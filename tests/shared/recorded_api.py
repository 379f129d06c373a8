# SPDX-License-Identifier: Apache-2.0
"""Play the requests of api_cases.py to whole servers in front of a scripted engine; run as a program to record answers.

    .venv/bin/python tests/shared/recorded_api.py

It writes tests/unit/api_answers.jsonl.gz and shows what has changed: do so only where answers are meant to. What
chance and the clock make (ids, times) is the same each time; of metrics only names and labels are kept.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np

from api_cases import Case, list_cases
from blink import __version__
from blink.config import FrontendConfig, ModelConfig
from blink.errors import OverloadedError
from blink.grammar.automaton import Automaton
from blink.grammar.compiler import compile_structured
from blink.region.layout import COMPLETION, CqeKind, FinishReason, Task
from blink.request.compilation import Client, Compilation
from blink.request.planner import Planner
from blink.structured_outputs import StructuredOutputsParams
from blink.text.assets import ModelAssets, load_assets
from fake_engine import FakeEngine, FakeServer
from harmony_model import write_harmony_model
from pooling_engine import PoolingEngine
from small_tokenizer import MODEL, with_names

RECORDING = Path(__file__).parents[1] / "unit" / "api_answers.jsonl.gz"
_NOW = 1_700
_VALUES = re.compile(r'(?<==)"[^"]*"|(?<=[}\w]) [\d.e+-]+$')  # of labels and metrics
_DURATIONS = re.compile(r'("\w+_(?:duration|ms|per_second)":)[\d.e+-]+')
_FILL_IN = {"<fim_prefix>": 20, "<fim_suffix>": 21, "<fim_middle>": 22}
_VARYING = ("content-length",)  # of pages that name the version


class ScriptedEngine(FakeEngine):
    """Says the texts of a case, a token at each turn, with made-up logprobs."""

    def __init__(self, assets: ModelAssets) -> None:
        super().__init__()
        self._assets = assets
        self._replies: tuple[str, ...] = ("",)
        self._open: dict[int, Iterator[list[dict[str, Any]]]] = {}

    def say(self, replies: tuple[str, ...]) -> None:
        """Give each sequence from now on one of these texts, in turn."""
        self.submitted.clear()
        self._open.clear()
        self._replies = replies

    def submit(self, prompt: Any, params: Any, **options: Any) -> int:
        sequence = super().submit(prompt, params, **options)
        self._open[sequence] = self._speak(self.submitted[-1], self._replies[(sequence - 1) % len(self._replies)])
        return sequence

    def cancel(self, sequence: int) -> None:
        super().cancel(sequence)
        self._open.pop(sequence, None)

    def drain(self) -> Any:
        entries: list[dict[str, Any]] = []
        for sequence, steps in list(self._open.items()):
            step = next(steps, None)
            if step is None:
                del self._open[sequence]
            else:
                entries += [{**entry, "sequence": sequence} for entry in step]
        rows = np.zeros(len(entries), COMPLETION)
        for row, entry in zip(rows, entries, strict=True):
            for name, value in entry.items():
                row[name] = value
        if entries:
            asyncio.get_running_loop().call_soon(self.wake)
        return rows

    def _speak(self, asked: SimpleNamespace, reply: str) -> Iterator[list[dict[str, Any]]]:
        """Yield the completions of each step of a sequence."""
        params, prompt = asked.params, [int(token) for token in asked.prompt]
        step: list[dict[str, Any]] = [{"kind": CqeKind.ADMITTED, "token": len(prompt) // 2}]
        if asked.params.native_values(0)["num_prompt_logprobs"]:
            for token in prompt[1:]:
                step += [*_rivals(token, params.prompt_logprobs), _scored(CqeKind.PROMPT_LOGPROB, token)]
        tokens = self._assets.tokenizer.encode(reply, add_special_tokens=False)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else asked.eos_token_ids)}
        tokens += [] if ends.intersection(tokens) else self._assets.eos_token_ids[:1]
        last = min(len(tokens), params.max_tokens or 1) - 1
        for index, token in enumerate(tokens[: last + 1]):
            reason = FinishReason.STOP if token in ends else FinishReason.LENGTH
            step += _named(params.logprob_token_ids) or _rivals(token, params.logprobs)
            yield [*step, _scored(CqeKind.TOKEN, token) | {"finish_reason": reason if index == last else 0}]
            step = []


def _rivals(token: int, number: int | None) -> list[dict[str, Any]]:
    return [_scored(CqeKind.TOP_LOGPROB, token + rank) for rank in range(number or 0)]


def _named(tokens: Sequence[int] | None) -> list[dict[str, Any]]:
    return [_scored(CqeKind.TOP_LOGPROB, token) for token in tokens or ()]


def _scored(kind: CqeKind, token: int) -> dict[str, Any]:
    return {"kind": kind, "token": token, "logprob": -0.25 * (1 + token % 7)}


class _PlainCompilation:
    """Compiles in this process."""

    async def compile(self, params: StructuredOutputsParams, client: Client) -> Automaton:
        del client
        return compile_structured(params)


class RecordedServers:
    """One server of each kind that the cases name, from when it is asked first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        plain = FrontendConfig(
            model=replace(MODEL, served_model_name=("m",)), region="test-recorded", max_tokenize_chars=199
        )
        guarded = replace(
            plain,
            api_key=("secret",),
            max_body_bytes=1000,
            allowed_origins=("https://a.example",),
            enable_request_id_headers=True,
        )
        admin = replace(plain, api_key=("secret",), admin_api_key=("master",), enable_admin_endpoints=True)
        tools = replace(plain, tool_call_parser="hermes", reasoning_parser="deepseek_r1")
        bare = replace(plain, page=False, enable_auto_tool_choice=False, model=ModelConfig(model=MODEL.model))
        self._openers: dict[str, Callable[[], FakeServer]] = {
            "plain": partial(self._open, plain),
            "tools": partial(self._open, tools),
            "harmony": partial(self._open_harmony, plain),
            "bare": partial(self._open, bare),
            "guarded": partial(self._open, guarded),
            "coder": partial(self._open, plain, is_coder=True),
            "away": partial(self._open, plain, ready=False, unavailable_reason="the engine is not running"),
            "admin": partial(self._open, admin),
            "away admin": partial(self._open, admin, ready=False, unavailable_reason="the engine is not running"),
            "full": partial(self._open, plain, refusal=OverloadedError("The queue is full.")),
            "embeds": partial(self._open_pooling, plain, Task.EMBED),
            "scores": partial(self._open_pooling, plain, Task.SCORE),
        }
        self._servers: dict[str, FakeServer] = {}

    def close(self) -> None:
        """End what the servers have begun."""
        for server in self._servers.values():
            server.close()

    async def answer(self, case: Case) -> dict[str, Any]:
        """Return the answer to a request, as it is recorded."""
        server = self._servers.get(case.server)
        if server is None:
            server = self._servers[case.server] = self._openers[case.server]()
        cast(ScriptedEngine | PoolingEngine, server.engine).say(case.replies)
        headers = {"Content-Type": "application/json", **case.headers} if case.content else case.headers
        with patch.object(secrets, "token_hex", _counted_ids()):
            response = await server.send_soon(case.method, case.path, content=case.content, headers=headers)
        body = (response.content + server.writer.written).decode().replace(__version__, "VERSION")
        body = _DURATIONS.sub(r"\g<1>0", body.replace(MODEL.model, "MODEL"))
        if case.path == "/metrics" and response.status_code == 200:
            lines = [line for line in body.splitlines() if not line.startswith("# HELP")]
            body = "\n".join(dict.fromkeys(_VALUES.sub("", line) for line in lines))
        elif case.path == "/" or case.path.startswith("/page/"):
            body = "a file" if body else ""
        kept = {name: value for name, value in response.headers.items() if name not in _VARYING}
        return {"status": response.status_code, "headers": kept, "body": body}

    def _open(self, config: FrontendConfig, *, is_coder: bool = False, **state: Any) -> FakeServer:
        assets = load_assets(config)
        if is_coder:
            assets = replace(assets, tokenizer=with_names(assets.tokenizer, _FILL_IN))
        server = FakeServer(config, assets, Path(mkdtemp(dir=self._folder)), ScriptedEngine(assets))
        server.service.planner = Planner(assets, cast(Compilation, _PlainCompilation()))
        vars(server.engine).update(state)
        return server

    def _open_harmony(self, config: FrontendConfig) -> FakeServer:
        model = str(write_harmony_model(self._folder / "harmony"))
        return self._open(replace(config, model=replace(config.model, model=model)))

    def _open_pooling(self, config: FrontendConfig, task: Task) -> FakeServer:
        return FakeServer(config, load_assets(config), Path(mkdtemp(dir=self._folder)), PoolingEngine(task))


@contextmanager
def open_servers() -> Iterator[RecordedServers]:
    """Give servers whose clock stands."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(time, "time", lambda: float(_NOW)))
        servers = RecordedServers(Path(stack.enter_context(TemporaryDirectory())))
        stack.callback(servers.close)
        yield servers


def play_all(cases: list[Case]) -> dict[str, dict[str, Any]]:
    """Return the answer to each case by its key."""

    async def play() -> dict[str, dict[str, Any]]:
        with open_servers() as servers:
            return {case.key: await servers.answer(case) for case in cases}

    return asyncio.run(play())


def read_recording() -> dict[str, dict[str, Any]]:
    """Return the recorded answers by their cases' keys."""
    if not RECORDING.is_file():
        return {}
    lines = map(json.loads, gzip.decompress(RECORDING.read_bytes()).splitlines())
    return {json.dumps(line["request"]): line["answer"] for line in lines}


def list_differences(old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]]) -> list[str]:
    """Return the requests that only one of two recordings has, and the answers that differ."""
    keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)]
    return [f"{key}\n- {json.dumps(old.get(key))}\n+ {json.dumps(new.get(key))}" for key in keys]


def _counted_ids() -> Any:
    numbers = count(1)
    return lambda _=32: f"id{next(numbers)}"


def check(servers: list[str]) -> int:
    """Show the answers of some servers, of all without any named, that have changed; return 1 if some have."""
    cases = [case for case in list_cases() if not servers or case.server in servers]
    keys = {case.key for case in cases}
    recorded = {key: answer for key, answer in read_recording().items() if not servers or key in keys}
    differences = list_differences(recorded, play_all(cases))
    print(f"{len(cases)} answers played", *differences, sep="\n")
    return int(bool(differences))


def main() -> int:
    """Record all answers anew and show what has changed; with --check SERVER ... only show it, and fail if it has."""
    logging.disable()
    if sys.argv[1:2] == ["--check"]:
        return check(sys.argv[2:])
    answers = play_all(list_cases())
    print("\n".join(list_differences(read_recording(), answers)))
    entries = ({"request": json.loads(key), "answer": answer} for key, answer in answers.items())
    text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    RECORDING.write_bytes(gzip.compress(text.encode(), mtime=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
