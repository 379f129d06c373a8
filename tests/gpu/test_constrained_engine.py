# SPDX-License-Identifier: Apache-2.0
"""The GPU engine keeps texts to their form, also while its host process is stopped."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_engine import CONFIG, PROMPT, connect
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from blink.grammar.compiler import compile_structured
from blink.link.client import EngineClient
from blink.region.layout import CqeKind, FinishReason
from blink.sampling_params import SamplingParams
from blink.structured_outputs import StructuredOutputsParams
from processes import wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

BYTES = [text for _, text in sorted((ord(char), char) for char in pre_tokenizers.ByteLevel.alphabet())]
NUM_TOKENS = 3000


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """An engine process with random weights, whose first tokens are the bytes."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(BYTES)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    region = f"gpu-{os.getpid()}-{secrets.token_hex(3)}"
    flags = [f"--model={tmp_path}", "--load-format=dummy", "--device=cuda", f"--region={region}"]
    process = subprocess.Popen([sys.executable, "-m", "blink", "engine", *flags, "--num-gpu-blocks-override=32768"])
    yield process, region
    process.send_signal(signal.SIGCONT)
    process.terminate()
    try:
        assert process.wait(20) == 0
    finally:
        process.kill()


def collect(client: EngineClient, sequences: list[int]) -> tuple[dict[int, str], dict[int, int]]:
    """Return the texts of sequences and why they ended."""
    texts, ends = dict.fromkeys(sequences, ""), dict[int, int]()
    deadline, next_tick = time.monotonic() + 60, 0.0
    while len(ends) < len(sequences):
        assert time.monotonic() < deadline, f"{len(sequences) - len(ends)} sequences did not end"
        if time.monotonic() >= next_tick:
            next_tick = time.monotonic() + 0.25
            assert client.tick() is None
        for completion in client.drain():
            sequence, kind = int(completion["sequence"]), int(completion["kind"])
            if kind == CqeKind.TOKEN:
                texts[sequence] += BYTES[int(completion["token"])]
            if completion["finish_reason"]:
                ends[sequence] = int(completion["finish_reason"])
        time.sleep(0.0005)
    return texts, ends


def test_texts_keep_their_form_while_the_host_process_is_stopped(engine: tuple[subprocess.Popen[bytes], str]) -> None:
    process, region = engine
    client = connect(region, process)
    patterns = [f"([0-9]{{3}}{chr(ord('a') + index)}){{{index + 1},900}}" for index in range(8)]
    automata = [compile_structured(StructuredOutputsParams(regex=pattern)) for pattern in patterns]
    short = compile_structured(StructuredOutputsParams(choice=["yes", "no"]))
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0)
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: "State:\tT" in Path(f"/proc/{process.pid}/status").read_text(), 10)
    long = [client.submit(PROMPT, params, seed=seed, automaton=each) for seed, each in enumerate(automata)]
    ended = [client.submit(PROMPT, params, seed=seed, automaton=short) for seed in range(8)]
    texts, ends = collect(client, [*long, *ended])
    process.send_signal(signal.SIGCONT)
    for index, sequence in enumerate(long):
        assert ends[sequence] == FinishReason.LENGTH and len(texts[sequence]) == NUM_TOKENS
        groups = [texts[sequence][at : at + 4] for at in range(0, NUM_TOKENS, 4)]
        assert all(group[:3].isdigit() and group[3] == chr(ord("a") + index) for group in groups)
    for sequence in ended:  # without an end token, the automaton's end is the text's
        assert ends[sequence] == FinishReason.STOP and texts[sequence] in ("yes", "no")
    assert client.stats()["automata_loaded"] == 9
    client.close()
