# SPDX-License-Identifier: Apache-2.0
"""The page of sampling parameters, made of their list: python tests/shared/sampling_table.py > docs/sampling.md."""

from __future__ import annotations

import re
from pathlib import Path

import blink
from blink.region.layout import SAMPLING
from blink.sampling_params import SAMPLING_RANGES

_LIST = Path(blink.__file__).parent / "csrc" / "sampler" / "params.h"
_LINE = re.compile(r'^  PARAM\(\w+, (\w+), .*"(.*)"\)', re.MULTILINE)
_HEAD = """# Sampling parameters

This page is made of the parameters' list (`python tests/shared/sampling_table.py > docs/sampling.md`); a test compares.

These parameters choose each token. Requests and `SamplingParams` take them by these names. What a request leaves out,
the model's `generation_config.json` may set, but for the presence and frequency penalties. A value out of its range
gets status 400, with the parameter's name.
"""
_TAIL = """
The sampler applies them in this order:

1. It hides tokens that the automaton of a structured output does not allow.
2. It hides stop tokens until there are `min_tokens` tokens, then adds `logit_bias`.
3. It applies the penalties: repetition, frequency, presence.
4. It divides the logits by the temperature.
5. It keeps what `min_p` keeps, of that what `top_k` keeps, and of that what `top_p` keeps. Equal logits stay together.
6. It draws one of the tokens that are left. With temperature 0 it takes the likeliest token after step 3.

The noise of a draw depends on the seed, the token's position and the token alone. So a request with a seed gets the
same noise in any batch. Log probabilities are those of the logits before step 1.
"""


def meanings() -> dict[str, str]:
    """Return what csrc/sampler/params.h says of each parameter."""
    return dict(_LINE.findall(_LIST.read_text()))


def render_page() -> str:
    """Return the page."""
    lines = [_HEAD, "| parameter | type | default | range | meaning |", "|---|---|--:|---|---|"]
    for name, meaning in meanings().items():
        allowed = SAMPLING_RANGES[name]
        kind = "float" if SAMPLING[name].kind == "f" else "integer"
        lines.append(f"| `{name}` | {kind} | {allowed.default:g} | {allowed} | {meaning} |")
    return "\n".join(lines) + "\n" + _TAIL


if __name__ == "__main__":
    print(render_page(), end="")
