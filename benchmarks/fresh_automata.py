# SPDX-License-Identifier: Apache-2.0
"""How long automata take that the engine has not seen: of who brings them, and of others' steps meanwhile.

A small model with random weights, whose first tokens are the bytes; the client drives a queue pair directly. `launch`
is the time on the engine's clock from the pass that reads a submission to the launch of its first step, `first token`
the client's from before submit() to the token. `scheduling` is what lies between the end of a step and the next launch
while eight other sequences decode and submissions of one kind never cease.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from engine_client import connect
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from blink.grammar.automaton import Automaton
from blink.grammar.compiler import compile_structured
from blink.link.client import EngineClient
from blink.region.layout import CqeKind
from blink.region.memory import open_region
from blink.sampling_params import SamplingParams
from blink.structured_outputs import StructuredOutputsParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
PROMPT = np.arange(100, 140, dtype=np.int32)
Source = Callable[[], Automaton | None]


@contextmanager
def start_engine(device: str, layers: int) -> Iterator[str]:
    """Run an engine process; yields its region."""
    region = f"bench-{os.getpid()}-{secrets.token_hex(3)}"
    texts = [text for _, text in sorted((ord(char), char) for char in pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(texts)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
        tokenizer.save(f"{folder}/tokenizer.json")
        flags = [f"--model={folder}", "--load-format=dummy", f"--device={device}", f"--region={region}"]
        flags += ["--max-model-len=8192", "--no-enable-prefix-caching"]
        process = subprocess.Popen([sys.executable, "-m", "blink", "engine", *flags])
        try:
            yield region
        finally:
            process.terminate()
            process.wait(30)


def compile_object(index: int, num_members: int) -> Automaton:
    """Compile an object of so many strings, of about 28 states each; another index, another automaton."""
    members = {f"member_{index:03d}_{each}": {"type": "string"} for each in range(num_members)}
    return compile_structured(
        StructuredOutputsParams(json={"type": "object", "properties": members, "required": list(members)})
    )


def forge(automaton: Automaton) -> Automaton:
    """Return an automaton that the engine takes for a new one."""
    copy = Automaton(automaton.data)
    copy.__dict__["name"] = secrets.token_bytes(len(automaton.name))
    return copy


def measure_one(client: EngineClient, region: str, automaton: Automaton | None) -> tuple[float, float]:
    """Return the microseconds to the launch of one sequence's first step, and to its first token."""
    client.tick()
    begin = time.perf_counter_ns()
    client.submit(PROMPT, SamplingParams(max_tokens=2, temperature=1.0, ignore_eos=True), seed=1, automaton=automaton)
    admitted = first = 0
    for completion in itertools.chain.from_iterable(client.drain() for _ in itertools.count()):
        assert completion["kind"] in (CqeKind.ADMITTED, CqeKind.TOKEN), "the engine refused it"
        if completion["kind"] == CqeKind.ADMITTED:
            admitted = int(completion["time_ns"])
        else:
            first = first or time.perf_counter_ns()
        if completion["finish_reason"]:
            break
    trace = open_region(region).trace()
    launched = trace["launched_ns"].astype(np.int64)
    return (int(launched[launched >= admitted].min()) - admitted) / 1e3, (first - begin) / 1e3


def measure_holdup(client: EngineClient, region: str, source: Source | None, seconds: float) -> np.ndarray:
    """Return the microseconds of scheduling before each step of some time while a source's sequences never cease."""
    before = int(open_region(region).trace()["step"].max())
    endless = SamplingParams(max_tokens=8000, temperature=1.0, ignore_eos=True)
    decoding = [client.submit(PROMPT, endless, seed=seed) for seed in range(8)]
    brief, others = SamplingParams(max_tokens=1, temperature=1.0, ignore_eos=True), set[int]()
    end, next_tick = time.monotonic() + seconds, 0.0
    while time.monotonic() < end:
        if time.monotonic() > next_tick:
            next_tick = time.monotonic() + 0.25
            client.tick()
        while source is not None and len(others) < 16:
            others.add(client.submit(PROMPT[:4], brief, seed=1, automaton=source()))
        others -= {int(each["sequence"]) for each in client.drain() if each["finish_reason"]}
    trace = np.sort(open_region(region).trace(), order="step")[:-2]
    for sequence in decoding:
        client.cancel(sequence)
    left = {*decoding, *others}
    while left:
        client.tick()
        left -= {int(each["sequence"]) for each in client.drain() if each["finish_reason"]}
    is_counted = (trace["step"] > before) & (trace["num_decode_rows"] >= len(decoding)) & (trace["idle_before"] == 0)
    steps = trace[is_counted]
    return (steps["launched_ns"].astype(np.int64) - steps["retired_ns"].astype(np.int64)) / 1e3


def describe(values: np.ndarray) -> str:
    return f"{np.median(values):9.1f} {np.percentile(values, 99):9.1f} {values.max():9.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each kind of submissions beside decoding")
    options = parser.parse_args()
    fresh = [compile_object(index, 7) for index in range(options.repeats)]
    large = compile_object(0, 120)
    states = int.from_bytes(fresh[0].data[:4], "little")
    sources: dict[str, Source] = {
        "no automaton": lambda: None,
        "a known automaton": lambda: large,
        f"a new one, {states} states, {len(fresh[0].data) >> 10} KiB": iter(fresh * 2).__next__,
        f"a new one, {len(large.data) >> 10} KiB": lambda: forge(large),
    }
    with start_engine(options.device, options.layers) as region:
        client = connect(region)
        for _ in range(20):
            measure_one(client, region, large)
        print(f"{'us':46} {'median':>9} {'p99':>9} {'most':>9}")
        for name, source in sources.items():
            found = np.array([measure_one(client, region, source()) for _ in range(options.repeats)])
            print(f"{'launch: ' + name:46} {describe(found[:, 0])}")
            print(f"{'first token: ' + name:46} {describe(found[:, 1])}", flush=True)
        sources[f"a new one, {states} states, {len(fresh[0].data) >> 10} KiB"] = lambda: forge(fresh[0])
        for name, source in {"nothing arrives": None, **sources}.items():
            found = measure_holdup(client, region, source, options.seconds)
            print(f"{'scheduling: ' + name:46} {describe(found)}", flush=True)
        print("automata loaded:", client.stats()["automata_loaded"])
        client.close()


if __name__ == "__main__":
    main()
