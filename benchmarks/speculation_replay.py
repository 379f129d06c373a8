# SPDX-License-Identifier: Apache-2.0
"""What speculation gives on a GPU: a model of random weights writes the texts of a real one, with drafts and without.

recorded_texts.json has the texts (record_texts.py made it). The scheduler finds its drafts in them as it does for the
real model, so as many are accepted. A draft head is right as often as a published one. Text that never repeats tells
what the flag costs without a draft.

python benchmarks/speculation_replay.py src/blink/models/configs/llama-3-8b --output replay.json
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from draft_heads import write_head
from scripted_engine import Script, run_scripted
from tensor_parallel import stopped

from blink import __version__
from blink.config import EngineConfig, ModelConfig
from blink.grammar.automaton import Automaton
from blink.grammar.compiler import compile_structured
from blink.link.client import EngineClient
from blink.models.weights.source import read_spec
from blink.region.layout import CqeKind
from blink.sampling_params import SamplingParams
from blink.structured_outputs import StructuredOutputsParams

TEXTS = Path(__file__).with_name("recorded_texts.json")
# Of RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3 on MT-Bench at temperature 0, with 3 draft tokens: the share of
# drafts that are right up to each place (vLLM, tests/v1/spec_decode/test_acceptance_length.py). 2.6 tokens a step.
EAGLE3_SHARES = (0.7296, 0.5208, 0.3545)
FRESH, FRESH_PROMPT, FRESH_ANSWER = "never repeats", 185, 200  # tokens
COLUMNS = ["text", "rows", "TPOT without ms", "TPOT with ms", "ratio", "tokens/s without", "tokens/s with"]
COLUMNS += ["tokens/step", "drafted", "accepted"]


@dataclass(frozen=True)
class Text:
    """A request whose answer is known."""

    kind: str
    prompt: list[int]
    answer: list[int]
    prediction: Sequence[int] = ()
    automaton: Automaton | None = None


@dataclass(frozen=True)
class Run:
    """What some sequences took at once."""

    tpot_ms: float  # the median of sequences
    tokens_per_second: float  # of a sequence
    tokens_per_step: float
    drafted: int
    accepted: int


def read_texts(options: argparse.Namespace, vocab_size: int) -> list[Text]:
    """Return the recorded texts of the kinds and the temperature that are asked for, and one that never repeats."""
    found: list[Text] = []
    for one in json.loads(options.texts.read_text())["texts"]:
        if one["kind"] not in options.kinds or one["temperature"] != options.temperature:
            continue
        form = one["schema"]
        if form is not None and not options.tokenizer:
            continue
        automaton = None if form is None else compile_structured(StructuredOutputsParams(json=form))
        found.append(Text(one["kind"], one["prompt"], one["answer"], one["prediction"], automaton))
    draw = np.random.default_rng(1).permutation(np.arange(1000, vocab_size))[: FRESH_PROMPT + FRESH_ANSWER].tolist()
    fresh = Text(FRESH, draw[:FRESH_PROMPT], draw[FRESH_PROMPT:])
    return [*found, fresh]


def make_script(texts: Sequence[Text], shares: Sequence[float] = ()) -> Script:
    """Return the script of all texts, whose first tokens are their numbers."""
    return Script([[index, *text.prompt[1:], *text.answer] for index, text in enumerate(texts)], shares)


def play(client: EngineClient, texts: Sequence[Text], chosen: Sequence[int]) -> Run:
    """Let some texts be written at once. Raises SystemExit where an answer is another."""
    before, answers = client.stats(), dict[int, tuple[int, list[int], list[int]]]()
    for index in chosen:
        text = texts[index]
        prompt = np.asarray([index, *text.prompt[1:]], np.int32)
        params = SamplingParams(max_tokens=len(text.answer), ignore_eos=True, temperature=0.0)
        prediction = np.asarray(text.prediction, np.int32)
        sequence = client.submit(prompt, params, seed=0, automaton=text.automaton, prediction=prediction)
        answers[sequence] = index, [], []
    num_open, next_tick = len(answers), 0.0
    while num_open:
        if time.monotonic() > next_tick:
            next_tick = time.monotonic() + 0.25
            if lost := client.tick():
                raise SystemExit(lost)
        for completion in client.drain():
            _, tokens, times = answers[int(completion["sequence"])]
            if completion["kind"] == CqeKind.TOKEN:
                tokens.append(int(completion["token"]))
                times.append(int(completion["time_ns"]))
            num_open -= completion["finish_reason"] != 0
    after = client.stats()
    for index, tokens, _ in answers.values():
        if tokens != texts[index].answer:
            raise SystemExit(f"text {index} ({texts[index].kind}) ended after {len(tokens)} tokens, or is another")
    return summarise([times for _, _, times in answers.values()], before, after)


def summarise(times: Sequence[Sequence[int]], before: Mapping[str, int], after: Mapping[str, int]) -> Run:
    """Return what sequences took while all decoded; times: of their tokens, in ns; those of one step are equal."""
    start, end = max(one[0] for one in times), min(one[-1] for one in times)
    if start >= end:
        raise SystemExit(f"an answer ended before all {len(times)} had begun: ask for fewer --rows")
    inside = [[stamp for stamp in one if start < stamp <= end] for one in times]
    tpot = statistics.median((end - start) / 1e6 / len(one) for one in inside)
    per_step = sum(map(len, inside)) / sum(len({*one}) for one in inside)
    drafted, accepted = (after[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
    return Run(tpot, 1e3 / tpot, per_step, drafted, accepted)


def measure(client: EngineClient, texts: Sequence[Text], cells: Sequence[tuple[str, int]], repeats: int) -> Table:
    """Return the median run of each kind and number of rows."""
    found: Table = {}
    play(client, texts, [0])  # clocks and caches are warm
    for kind, rows in cells:
        own = [index for index, text in enumerate(texts) if text.kind == kind]
        chosen = [own[row % len(own)] for row in range(rows)]
        runs = [play(client, texts, chosen) for _ in range(repeats)]
        found[kind, rows] = sorted(runs, key=attrgetter("tpot_ms"))[len(runs) // 2]
    return found


Table = dict[tuple[str, int], Run]


def make_config(options: argparse.Namespace, speculative: Mapping[str, Any] | None) -> EngineConfig:
    """Return the configuration of an engine without a prefix cache, whose decoding steps no prompt preempts."""
    rows = max(*options.rows, *options.fresh_rows)
    return EngineConfig(
        region=f"bench-{os.getpid()}-{secrets.token_hex(3)}",
        model=ModelConfig(
            model=str(options.model), load_format="dummy", max_model_len=1024, tokenizer=options.tokenizer
        ),
        device=options.device,
        num_gpu_blocks_override=options.num_blocks,
        max_num_seqs=rows,
        enable_prefix_caching=False,
        overtake_share=0.0,
        speculative_config="" if speculative is None else json.dumps(speculative),
    )


def watch_stopped(client: EngineClient, process: int, texts: Sequence[Text], options: argparse.Namespace) -> list[Any]:
    """Return a row of the table of a stopped engine process: TPOT p50 before, and while it is stopped."""
    own = [index for index, text in enumerate(texts) if text.kind in ("edit", "chat")]
    chosen = [own[row % len(own)] for row in range(max(options.rows))]

    def play_for(seconds: float) -> list[float]:
        end, found = time.monotonic() + seconds, list[float]()
        while not found or time.monotonic() < end:
            found.append(play(client, texts, chosen).tpot_ms)
        return found

    alone = statistics.median(play_for(options.stopped / 3))
    with stopped(process):
        held = statistics.median(play_for(options.stopped))
    return [len(chosen), options.stopped, round(alone, 3), round(held, 3), round(held / alone, 4)]


@contextmanager
def head_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the configuration of a random head of the published shape."""
    with tempfile.TemporaryDirectory() as folder:
        head = write_head(Path(folder), options.model)
        yield {"method": "eagle3", "model": str(head), "num_speculative_tokens": len(EAGLE3_SHARES)}


def run_all(options: argparse.Namespace, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the tables; tell what is ready."""
    texts = read_texts(options, read_spec(options.model).vocab_size)
    kinds = dict.fromkeys(text.kind for text in texts)
    cells = [(kind, rows) for kind in kinds for rows in (options.fresh_rows if kind == FRESH else options.rows)]
    with run_scripted(make_config(options, None), make_script(texts)) as (client, _):
        tell("an engine without the flag")
        plain = measure(client, texts, cells, options.repeats)
    ngram = {"method": "ngram", "num_speculative_tokens": options.drafts}
    frozen = list[list[Any]]()
    with run_scripted(make_config(options, ngram), make_script(texts)) as (client, process):
        tell("an engine with the flag")
        drafting = measure(client, texts, cells, options.repeats)
        if options.stopped:
            frozen.append(watch_stopped(client, process, texts, options))
    tables = [tabulate("Texts of a real model, with n-grams, predictions and grammars", plain, drafting)]
    of_head = [(FRESH, rows) for rows in options.fresh_rows if rows <= max(options.rows)]
    if options.head:
        with (
            head_of(options) as config,
            run_scripted(make_config(options, config), make_script(texts, EAGLE3_SHARES)) as (client, _),
        ):
            tell("an engine with a draft head")
            headed = measure(client, texts, of_head, options.repeats)
        tables.append(tabulate("A draft head that is right as often as a published EAGLE-3 head", plain, headed))
    if frozen:
        columns = ["rows", "stopped s", "TPOT p50 ms", "TPOT p50 stopped ms", "ratio"]
        tables.append({"title": "With the engine's process stopped", "columns": columns, "rows": frozen})
    return tables


def tabulate(title: str, plain: Table, drafting: Table) -> dict[str, Any]:
    """Return a table of results: each kind and number of rows without drafts and with them."""
    rows = list[list[Any]]()
    for (kind, count), run in drafting.items():
        before = plain[kind, count]
        times = [round(before.tpot_ms, 3), round(run.tpot_ms, 3), round(run.tpot_ms / before.tpot_ms, 3)]
        speeds = [round(before.tokens_per_second, 1), round(run.tokens_per_second, 1)]
        rows.append([kind, count, *times, *speeds, round(run.tokens_per_step, 2), run.drafted, run.accepted])
    return {"title": title, "columns": COLUMNS, "rows": rows}


def show(table: Mapping[str, Any]) -> str:
    widths = [max(14, len(column) + 2) for column in table["columns"]]
    lines = [[*table["columns"]], *table["rows"]]
    cells = ["".join(f"{cell!s:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([table["title"], *cells])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory with a config.json; weights are random")
    parser.add_argument("--texts", type=Path, default=TEXTS)
    parser.add_argument("--kinds", nargs="+", default=["edit", "json"], help="of chat, json, edit and quotes")
    parser.add_argument("--temperature", type=float, default=0.0, help="at which the texts were written: 0 or 0.8")
    parser.add_argument("--tokenizer", default="", help="of the recorded model, which JSON needs; empty: no JSON")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="texts at once")
    parser.add_argument("--fresh-rows", type=int, nargs="+", default=[1, 8, 64, 256], help="of text that never repeats")
    parser.add_argument("--drafts", type=int, default=7, help="most draft tokens of a sequence in a step")
    parser.add_argument("--head", action=argparse.BooleanOptionalAction, default=True, help="measure a draft head too")
    parser.add_argument("--stopped", type=float, default=0, help="seconds to stop the engine's process for; 0: not")
    parser.add_argument("--repeats", type=int, default=3, help="runs, of which the median is shown")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--num-blocks", type=int, default=8192, help="KV cache blocks")
    parser.add_argument("--output", type=Path, help="write the tables as JSON, for results/DATE-MACHINE")
    return parser.parse_args()


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Return what a result tells beside its tables; the machine is for its reader to fill in."""
    recorded = json.loads(options.texts.read_text())
    return {
        "title": "Speculation on texts of a real model",
        "date": time.strftime("%Y-%m-%d"),
        "machine": "",
        "versions": {"Blink": __version__},
        "settings": [
            f"{options.model.name} with random weights, which writes the texts of {recorded['model']} at temperature "
            f"{options.temperature:g}; texts that never repeat are random tokens",
            f"up to {options.drafts} drafts a sequence by n-grams; a head's {len(EAGLE3_SHARES)} are right up to each "
            f"place with a chance of {', '.join(map(str, EAGLE3_SHARES))}",
        ],
        "commands": ["python benchmarks/speculation_replay.py"],
        "runs": f"median of {options.repeats}",
        "raw_data": "not kept",
    }


def main() -> None:
    options, start = parse(), time.monotonic()
    if "json" in options.kinds and not options.tokenizer:
        print("JSON is left out: it needs --tokenizer")
    tables = run_all(options, lambda what: print(f"{time.monotonic() - start:6.1f} s: {what} is ready", flush=True))
    print(*map(show, tables), sep="\n\n")
    if options.output:
        options.output.write_text(json.dumps(describe(options) | {"tables": tables}, indent=1))


if __name__ == "__main__":
    main()
