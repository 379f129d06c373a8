# SPDX-License-Identifier: Apache-2.0
"""Drafts of what a grammar leaves no choice of: the scheduler with a fake model that writes a text of the grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from blink.bits import power_of_two
from blink.engine.vocabulary import write_vocabulary
from blink.grammar.automaton import Automaton
from blink.grammar.compiler import compile_structured
from blink.link.queue_pair import QueuePair, Submission
from blink.region.layout import CONSTANTS, SLOT_PARAMS, FinishReason, new_struct
from blink.region.native import lib
from blink.sampling_params import SamplingParams
from blink.structured_outputs import StructuredOutputsParams
from blink.text.vocabulary import Vocabulary
from harness import MILLISECOND, Harness, Inbox, run_until_finished, small_config

STOP = 256
WORDS = ['{"', "name", '":', ' "', '",', "kind", "fruit", "tree", '"}', "count", ": ", ', "', "false"]
WORDS += ["\n ", "\n   ", "\n       ", " {", " }"]  # white space but for its last space, which the next token has
TOKENS = [*(bytes([byte]) for byte in range(256)), b"\xffstop", *(word.encode() for word in WORDS)]
VOCAB = len(TOKENS)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["fruit", "tree"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
TEXT = '{"name": "a pear", "kind": "fruit"}'


def cut(text: str) -> list[int]:
    """Cut a text into its longest tokens, from the left, and end it."""
    data, found = text.encode(), list[int]()
    while data:
        token = max((t for t in range(VOCAB) if t != STOP and data.startswith(TOKENS[t])), key=lambda t: len(TOKENS[t]))
        found.append(token)
        data = data[len(TOKENS[token]) :]
    return [*found, STOP]


class Writer(Harness):
    """A model that writes a given text, whatever stands before; its rows move on in their automata."""

    answers: dict[int, list[int]]  # by the first token of the prompt

    def compute(self) -> None:
        super().compute()
        rows = int(self.batch[0]["num_rows"])
        slots, lens = (self.step_array(name, "i4")[:rows].tolist() for name in ("row_slots", "context_lens"))
        params = self.state.array("params", SLOT_PARAMS)
        for row, (slot, length) in enumerate(zip(slots, lens, strict=True)):
            generated = length - int(params[slot]["num_prompt_tokens"])
            if params[slot]["automaton"]:
                self._move_on(slot, max(generated, 0), int(self.tokens[slot, length - 1]))
            answer = self.answers[int(self.tokens[slot, 0])]
            self.step_array("sampled_tokens", "i4")[row] = answer[min(max(generated, 0), len(answer) - 1)]

    def _move_on(self, slot: int, num_generated: int, last: int) -> None:
        def place(name: str, per_slot: int) -> int:
            return self.state.array(name, "u1").ctypes.data + slot * per_slot

        num_lists, slots = int(self.geometry["spec_tokens"]) + 2, int(self.geometry["num_slots"])
        index = int(self.state.array("params", SLOT_PARAMS)[slot]["automaton"]) - 1
        row = new_struct(
            "ConstrainedRow",
            automaton=self.state.array("automata", "u1").ctypes.data + index * CONSTANTS["max_automaton_bytes"],
            places=place("automaton_places", self.state.array("automaton_places", "u1").size // slots),
            lists=place("token_bitmasks", self.state.array("token_bitmasks", "u1").size // slots),
            num_lists=num_lists,
            token_starts=self.state.array("token_starts", "u4").ctypes.data,
            token_text=self.state.array("token_text", "u1").ctypes.data,
            stop_tokens=place("stop_tokens", CONSTANTS["max_stop_tokens"] * 4),
            num_stop_tokens=1,
            vocab_size=VOCAB,
            num_generated=num_generated,
            last_token=last,
        )
        lib.blink_list_allowed(row.ctypes.data)


def open_writer(drafts: int) -> Writer:
    config = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 9} if drafts else {}
    text = b"".join(TOKENS).ljust(512, b"\0")
    h = Writer(
        small_config(speculative_config=json.dumps(config), lease_timeout=3600, stall_timeout=3600),
        max_model_len=128,
        vocab_size=VOCAB,
        num_blocks=64,
        vocab_bytes=len(text),
        token_entries=power_of_two(4 * VOCAB) if drafts else 0,
    )
    starts = np.fromiter(accumulate(map(len, TOKENS), initial=0), np.uint32)
    write_vocabulary(Vocabulary(starts, np.frombuffer(text, np.uint8)), h.state.tensor)
    h.answers = {}
    return h


def compiled(**form: Any) -> Automaton:
    return Automaton(compile_structured(StructuredOutputsParams(**form)).data)


def ask(h: Writer, pair: QueuePair, text: str | Sequence[int], automaton: Automaton | None, prompt: int = 3) -> int:
    h.answers[prompt] = cut(text) if isinstance(text, str) else [*text]
    entry = Submission(np.asarray([prompt, 1, 4], np.int32), (STOP,), 0, b"", automaton=automaton)
    return pair.submit(entry, SamplingParams(max_tokens=100))


def write(text: str | Sequence[int], automaton: Automaton | None, drafts: int = 7) -> tuple[int, int, int]:
    """Return the launches that an answer takes, and how many tokens were drafted and accepted."""
    h = open_writer(drafts)
    try:
        pair, inbox = h.frontend(), Inbox()
        sequence = ask(h, pair, text, automaton)
        run_until_finished(h, inbox, [pair], [sequence])
        assert inbox.tokens(sequence) == h.answers[3] and inbox.finish(sequence) == FinishReason.STOP
        return h.num_launches, h.statistic("draft_tokens"), h.statistic("accepted_tokens")
    finally:
        h.close()


def test_what_a_schema_forces_is_drafted_with_the_space_behind_a_colon() -> None:
    automaton = compiled(json=SCHEMA)
    plain, *_ = write(TEXT, automaton, drafts=0)
    assert plain == len(cut(TEXT))
    launches, drafted, accepted = write(TEXT, automaton)
    # Behind `{"`, then behind `",`, and then behind `fruit`.
    assert accepted == drafted == len(["name", '":', ' "']) + len([' "', "kind", '":', ' "']) + len(['"}'])
    assert launches == plain - accepted


def test_a_text_without_spaces_costs_rows_and_changes_nothing() -> None:
    text = TEXT.replace(": ", ":").replace(", ", ",")
    launches, drafted, accepted = write(text, compiled(json=SCHEMA))
    assert launches == len(cut(text)) - accepted and 4 <= accepted < drafted


FRUITS = {"type": "array", "minItems": 3, "maxItems": 3, "items": SCHEMA}
STYLES: dict[str, dict[str, Any]] = {
    "usual": {},
    "compact": {"separators": (",", ":")},
    "indented": {"indent": 2},
    "indented by 4": {"indent": 4},
    "newlines alone": {"indent": 0},
}


@pytest.mark.parametrize("name", ["pear", 'a "pear", [', "back\\"])
@pytest.mark.parametrize("style", STYLES)
def test_white_space_is_drafted_as_the_text_has_had_it(style: str, name: str) -> None:
    """Only names, and the first letters of kinds, are left to the model: what stands in names is no JSON."""
    text = json.dumps([{"name": f"{n} {name}", "kind": "fruit"} for n in range(3)], **STYLES[style])
    launches, _, accepted = write(text, compiled(json=FRUITS), drafts=15)
    free = len(json.dumps(f"0 {name}")) - 1 + len("f")
    assert launches == len(cut(text)) - accepted
    assert launches <= 3 * (free + 1) + 2  # the first object tells


def test_tokens_that_the_model_cuts_otherwise_change_nothing() -> None:
    automaton = compiled(json=SCHEMA)
    letters = [*TEXT.encode(), STOP]
    launches, drafted, accepted = write(letters, automaton)
    assert launches == len(letters) - accepted and drafted > accepted > 0


@pytest.mark.parametrize("drafts", [1, 2, 15])
def test_a_choice_of_one_text_takes_as_few_steps_as_drafts_allow(drafts: int) -> None:
    text = '{"name": "tree", "kind": "fruit"}' * 2
    count = len(cut(text))
    launches, drafted, accepted = write(text, compiled(choice=[text]), drafts)
    assert drafted == accepted == count - launches and launches == 1 + -(-(count - 1) // (1 + drafts))


def test_inside_of_a_string_nothing_is_guessed_and_the_fast_path_is_taken() -> None:
    text = '{"name": "' + "pears, grapes; pomelos: quinces and figs" + '", "kind": "tree"}'
    h = open_writer(7)
    try:
        pair, inbox = h.frontend(), Inbox()
        run_until_finished(h, inbox, [pair], [ask(h, pair, text, compiled(json=SCHEMA))])
        assert int(h.scheduler["num_fast_steps"]) >= 30
    finally:
        h.close()


def test_guesses_that_are_wrong_for_long_rest() -> None:
    """Every comma of this form may be followed by a space, and none is."""
    automaton, text = compiled(regex="([a-z](,[ a-z]|;[a-z])){26}"), "".join(f"{chr(97 + i)},a" for i in range(26))
    h = open_writer(7)
    try:
        pair, inbox = h.frontend(), Inbox()
        sequence = ask(h, pair, text, automaton)
        run_until_finished(h, inbox, [pair], [sequence])
        assert inbox.tokens(sequence) == cut(text)
        assert h.statistic("num_drafts") < 12 and int(h.scheduler["num_fast_steps"]) > 20
    finally:
        h.close()


def test_where_time_is_not_won_nothing_is_guessed() -> None:
    h = open_writer(7)
    try:
        for graph in range(int(h.geometry["num_graphs"])):
            h.costs[graph] = (MILLISECOND * int(h.geometry["graphs"][graph]["rows"]), 0, 1)
        pair, inbox = h.frontend(), Inbox()
        run_until_finished(h, inbox, [pair], [ask(h, pair, TEXT, compiled(json=SCHEMA))])
        assert h.statistic("draft_tokens") == 0
    finally:
        h.close()


def test_constrained_and_plain_sequences_share_their_steps() -> None:
    h = open_writer(4)
    try:
        pair, inbox = h.frontend(), Inbox()
        automaton, other = compiled(json=SCHEMA), compiled(choice=[TEXT, TEXT.replace("pear", "fig")])
        texts = [(TEXT, automaton), (TEXT, None), (TEXT, other), (TEXT.replace("fruit", "tree"), automaton)]
        sequences = [ask(h, pair, text, form, prompt) for prompt, (text, form) in enumerate(texts)]
        run_until_finished(h, inbox, [pair], sequences)
        for sequence, (text, _) in zip(sequences, texts, strict=True):
            assert inbox.tokens(sequence) == cut(text)
        assert h.statistic("accepted_tokens") > 20
    finally:
        h.close()


def test_items_that_have_to_differ_are_drafted_as_if_they_need_not() -> None:
    schema = {"type": "array", "uniqueItems": True, "minItems": 2, "maxItems": 3, "items": {"enum": ["fruit", "tree"]}}
    text = '["tree", "fruit"]'
    launches, drafted, accepted = write(text, compiled(json=schema))
    assert launches == len(cut(text)) - accepted and drafted >= accepted > 0
