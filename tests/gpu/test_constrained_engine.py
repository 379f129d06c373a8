# SPDX-License-Identifier: Apache-2.0
"""The GPU engine keeps texts to their form, also while its host process is stopped."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_engine import PROMPT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from blink.grammar.compiler import compile_structured
from blink.link.client import EngineClient
from blink.region.layout import CqeKind, FinishReason
from blink.sampling_params import SamplingParams
from blink.structured_outputs import StructuredOutputsParams
from engine_process import connect, run_engine_process
from processes import wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

BYTES = [text for _, text in sorted((ord(char), char) for char in pre_tokenizers.ByteLevel.alphabet())]
NUM_TOKENS, NUM_ITEMS = 3000, 40
ITEMS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 99999},
            "kind": {"enum": ["red", "blue"]},
            "word": {"type": "string", "pattern": "^[a-z]{4,9}$"},
        },
        "required": ["id", "kind", "word"],
    },
    "minItems": NUM_ITEMS,
    "maxItems": NUM_ITEMS,
}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """An engine process with random weights, whose first tokens are the bytes."""
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(BYTES)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with run_engine_process(tmp_path, "--num-gpu-blocks-override=32768") as running:
        yield running


class Texts:
    """What sequences have written, and why they ended."""

    def __init__(self, client: EngineClient) -> None:
        self.texts = defaultdict[int, list[str]](list)
        self.ends = dict[int, int]()
        self._client = client

    def collect(self, until: Callable[[], bool]) -> None:
        deadline, next_tick = time.monotonic() + 60, 0.0
        while not until():
            assert time.monotonic() < deadline, f"{len(self.ends)} of {len(self.texts)} sequences have ended"
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + 0.25
                assert self._client.tick() is None
            for completion in self._client.drain():
                sequence = int(completion["sequence"])
                if completion["kind"] == CqeKind.TOKEN:
                    self.texts[sequence].append(BYTES[int(completion["token"])])
                if completion["finish_reason"]:
                    self.ends[sequence] = int(completion["finish_reason"])
            time.sleep(0.0005)

    def of(self, sequence: int) -> str:
        return str(decoders.ByteLevel().decode(self.texts[sequence]))


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: "State:\tT" in Path(f"/proc/{process.pid}/status").read_text(), 10)


def check_groups(text: str, letter: str) -> None:
    """Each four characters are three digits and the letter of the pattern."""
    assert len(text) == NUM_TOKENS
    groups = [text[at : at + 4] for at in range(0, NUM_TOKENS, 4)]
    assert all(group[:3].isdigit() and group[3] == letter for group in groups)


def check_items(text: str) -> None:
    items = json.loads(text)
    assert len(items) == NUM_ITEMS
    for item in items:
        assert list(item) == ["id", "kind", "word"] and type(item["id"]) is int and item["kind"] in ("red", "blue")
        assert re.fullmatch("[a-z]{4,9}", item["word"])


def test_texts_keep_their_form_while_the_host_process_is_stopped(engine: tuple[subprocess.Popen[bytes], str]) -> None:
    """Some are in their middle when it stops, some begin and bring automata that the engine has not seen."""
    process, region = engine
    client = connect(region, process)
    patterns = [f"([0-9]{{3}}{chr(ord('a') + index)}){{{index + 1},900}}" for index in range(8)]
    automata = [compile_structured(StructuredOutputsParams(regex=pattern)) for pattern in patterns]
    short = compile_structured(StructuredOutputsParams(choice=["yes", "no"]))
    items = compile_structured(StructuredOutputsParams(json=ITEMS, disable_any_whitespace=True))
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0)
    found = Texts(client)
    begun = [client.submit(PROMPT, params, seed=seed, automaton=each) for seed, each in enumerate(automata[:4])]
    written = [client.submit(PROMPT, params, seed=seed, automaton=items) for seed in range(4)]
    found.collect(lambda: all(len(found.texts[sequence]) > 100 for sequence in (*begun, *written)))
    stop(process)
    at_stop = {sequence: len(found.texts[sequence]) for sequence in (*begun, *written)}
    later = [client.submit(PROMPT, params, seed=seed, automaton=each) for seed, each in enumerate(automata[4:])]
    ended = [client.submit(PROMPT, params, seed=seed, automaton=short) for seed in range(8)]
    found.collect(lambda: len(found.ends) == len(at_stop) + len(later) + len(ended))
    process.send_signal(signal.SIGCONT)
    for letter, sequence in zip("abcdefgh", [*begun, *later], strict=True):
        assert found.ends[sequence] == FinishReason.LENGTH
        check_groups(found.of(sequence), letter)
    for sequence in [*written, *ended]:  # without an end token, the automaton's end is the text's
        assert found.ends[sequence] == FinishReason.STOP
    for sequence in written:
        check_items(found.of(sequence))
    assert all(found.of(sequence) in ("yes", "no") for sequence in ended)
    # Most of what was begun came while nothing of the host's could have helped.
    assert all(len(found.texts[sequence]) > 2 * length for sequence, length in at_stop.items())
    assert client.stats()["automata_loaded"] == 10
    client.close()
