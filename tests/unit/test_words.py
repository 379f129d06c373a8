# SPDX-License-Identifier: Apache-2.0
"""Words of our own that the field's have replaced, or will: how often each still occurs in its rooms.

A count may only fall: who replaces words writes the new one here. Paths count as well as texts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_SUFFIXES = {".py", ".h", ".cuh", ".cu", ".cpp", ".md", ".json"}

_CSRC = tuple(f"src/blink/csrc/{room}" for room in ("scheduler", "device", "region", "cpu", "rdma", "automaton"))
_DOCS = ("docs", "README.md", "CONTRIBUTING.md")
_SCHEDULER = (*_CSRC, "src/blink/engine", "src/blink/link", "src/blink/region", "tests/native", *_DOCS)
_ALL = ("src/blink", *_DOCS)
_KERNELS = ("src/blink/kernels", "src/blink/models", "src/blink/runner", "src/blink/csrc/kernels")


@dataclass(frozen=True)
class Banned:
    """A word of our own, the field's word, and how often the former occurs in its rooms: today, and in the end.

    what: the word as it stood in a text.
    """

    what: str
    instead: str
    pattern: str
    rooms: tuple[str, ...]
    today: int = 0
    end: int = 0


WORDS = [
    Banned("Track::kWhole", "StepKind", r"\bTracks?\b|\btrack_in_flight|in_flight_track|\btracks\.h", _SCHEDULER),
    Banned("a suspended step", "paused step", r"(?<!-)\bsuspend(ed|s)?\b|\bsuspended_", _SCHEDULER),
    Banned("Turn::kAll", "StepClass", r"\bTurn(::|\.|\()|has_turn|choose_turn|segmented_turn|\bturns\.h", _SCHEDULER),
    Banned("Tally t", "StepTotals", r"\b[tT]ally\b", _SCHEDULER),
    Banned("Harvest harvest", "RetireTotals", r"\b[hH]arvest\b", _SCHEDULER),
    Banned("measure_demand(", "RunnableWork", r"\bDemand\b|\b\w+_demand\b", _SCHEDULER),
    Banned(
        "settle(env", "fast path", r"\bsettle\w*|\b(may|prepare)_repeat\b|\brepeats?\(|repeat\.h|goes_on\b", _CSRC[:2]
    ),
    Banned("owed_ns", "best-effort credit", r"\bowe[ds]\w*", (*_CSRC[:2], "docs/scheduling.md")),
    Banned("price", "preemption cost", r"(_|\b)prices?\b", (*_CSRC[:2], "src/blink/engine", "docs/scheduling.md")),
    # The flag --overtake-share, and the fields of its name, stay.
    Banned(
        "is_overtaken",
        "prefill preempts decode",
        r"(?i)(?:_|\bk?)overt(?:ak|ook)(?!e[-_]share)\w*",
        (*_SCHEDULER, "src/blink/config.py"),
    ),
    Banned("carve(state", "lay out the arrays", r"\bcarve\b", _SCHEDULER),
    Banned("Silence()", "heartbeat age, heartbeat timeout", r"\bSilence\b|_silence\b|_SILENCE\b", _ALL),
    Banned("cpu/lookout.h", "completion poller", r"[lL]ookout", _SCHEDULER),
    Banned("blink_waiter_start", "completion poller", r"\bWaiter\b|_waiter(_|\b)|\bwaiter\.h", _SCHEDULER),
    Banned("gpu/watch.cuh", "device/wait.cuh", r"\bwatch\.cuh|\bwatch_step\b", _ALL),
    Banned("near.state", "SharedState", r"\bnear\.(cuh|\w+)|\bNear\b|\bkNear[A-Z]\w+", (*_CSRC[:3], *_DOCS)),
    Banned("blink_keeper_stop", "lease renewer", r"[kK]eeper", _SCHEDULER),
    Banned("csrc/gpu/device.cu", "csrc/device/", r"gpu/(device|device_env|program|near)\.cuh?\b|\bdevice\.cu\b", _ALL),
    Banned("kTextEnd", "kGrammarDone", r"kTextEnd|\b_?TEXT_END\b", _ALL),
    Banned("kNoToken", "kInvalidLogits", r"kNoToken\b|\b_?NO_TOKEN\b", _ALL),
    Banned("allowed_lists", "token bitmasks", r"\ballowed_lists\b", _ALL),
    Banned("prompt_scores", "prompt logprobs", r"(?i)prompt_scores", _ALL),
    Banned("wants_scores", "prompt logprobs", r"_scores?\b|\bscores\b|Score|\bscored\b|num_scored", _CSRC[:1]),
    Banned("multiprocessors", "SM", r"(?i)multiprocessor", (*_SCHEDULER, "benchmarks/README.md")),
    Banned("leave_room", "reserve_sm()", r"\bleave_room\b", _ALL),
    # The kernels' words.
    Banned("Planes", "hi/lo FP8 activations, HiLo", r"(?i)planes?(?![a-z])", _KERNELS),
    Banned("GemmSplit", "tile config, GemmConfig", r"[A-Za-z]Split\b|(?<!\.)\bsplits\b|_splits\b", _KERNELS),
    Banned("products", "GEMM, matmul", r"(?i)(?<!itertools\.)(?<!dot_)products?(?![a-z]|\.h)", _KERNELS, 20, 20),
    Banned("RingSplit", "multistage pipeline, PipelineConfig", r"\bring\b|Ring[A-Z]|\bring_|_ring\b", _KERNELS),
    Banned("squares", "NormInput, partial sums of squares", r"\bNormed\b|\brates\b|\bsquares\b", _KERNELS, 20, 20),
    # The name of CUDA's attribute stays.
    Banned("programmatic", "PDL", r"(?i)programmatic(?!Stream)", _KERNELS, 2, 2),
    Banned("prompts/products.cu", "prefill/, prefill GEMM", r"\bprompts/|prompt_products", _KERNELS),
    Banned("gates.cu", "fused gate-up", r"gates\.cu|gated_products|gates and ups", _KERNELS),
    Banned("placed_experts", "token permutation", r"(?i)placement|placed_experts", _KERNELS),
    Banned("find_form", "FormatId", r"\bfind_form\b|\bForm\b", _KERNELS),
    Banned("unpack", "dequantize", r"(?<!struct\.)\b_?unpack(ed|s|ing|_(?!from)\w+)?\b", _KERNELS[:1] + _KERNELS[2:]),
    Banned("fine=True", "bucket rows", r"\bfine[=:]", _KERNELS),
    Banned("multiprocessors", "SM", r"(?i)(?<!per_)multiprocessor", _KERNELS),
]


@cache
def texts_of(room: str) -> tuple[str, ...]:
    """Return the texts of a room's files, each behind the file's path."""
    path = _ROOT / room
    files = sorted(each for each in path.rglob("*") if each.suffix in _SUFFIXES) if path.is_dir() else [path]
    return tuple(f"{each.relative_to(_ROOT)}\n{each.read_text()}" for each in files if each.is_file())


def find(word: Banned) -> list[str]:
    """Return where a word occurs: a path for each time."""
    pattern = re.compile(word.pattern)
    texts = (text for room in word.rooms for text in texts_of(room))
    return [text.partition("\n")[0] for text in texts for _ in pattern.finditer(text)]


@pytest.mark.parametrize("word", WORDS, ids=lambda word: f"{word.what}: {word.instead}")
def test_a_word_of_our_own_only_goes(word: Banned) -> None:
    found = find(word)
    assert len(found) <= word.today, f"say {word.instead!r} instead: {sorted(set(found))}"
    assert word.end <= word.today


@pytest.mark.parametrize("word", WORDS, ids=lambda word: f"{word.what}: {word.instead}")
def test_a_pattern_finds_its_word(word: Banned) -> None:
    assert re.search(word.pattern, word.what)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("is_overtaken", "--overtake-share, g.overtake_share"),
        ("squares", "square matrices"),
        ("programmatic", "programmaticStreamSerializationAllowed"),
        ("RingSplit", "string, the trace's rings"),
        ("GemmSplit", "text.split(',')"),
        ("products", "production"),
        ("unpack", "struct.unpack('<Q', word)"),
        ("Turn::kAll", "the next turn; Turn a body into a request"),
    ],
)
def test_a_pattern_spares_ordinary_words(what: str, text: str) -> None:
    [pattern] = {word.pattern for word in WORDS if word.what == what}
    assert re.search(pattern, text) is None
