# SPDX-License-Identifier: Apache-2.0
"""The page of sampling parameters, made of their list: python tests/shared/sampling_table.py > docs/sampling.md."""

from __future__ import annotations

import re
from pathlib import Path

import blink
from blink.region.layout import SAMPLING
from blink.sampling_ranges import SAMPLING_RANGES

_LIST = Path(blink.__file__).parent / "csrc" / "sampler" / "params.h"
_LINE = re.compile(r'^  PARAM\(\w+, (\w+), .*"(.*)"\)', re.MULTILINE)
_HEAD = """# Sampling parameters

These parameters choose each token. Requests and `SamplingParams` take them by these names. If a request omits one, the
model's `generation_config.json` may set it. The presence and frequency penalties are exceptions: their default is 0. A
value out of its range gets status 400, with the parameter's name.

`--override-generation-config` replaces parts of that file, and `--generation-config vllm` leaves it out. Its
`max_new_tokens` is the most that any request gets. The default model has the defaults of its card: temperature 0.2,
`top_p` 0.9.

```sh
curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{
  "prompt": "Once upon a time", "temperature": 0.7, "top_p": 0.9, "seed": 1}'
```

This page is made from the list of parameters by `python tests/shared/sampling_table.py > docs/sampling.md`.
"""
_TAIL = """
The sampler applies them in this order:

1. It masks tokens that the automaton of a structured output does not allow.
2. It masks stop tokens until there are `min_tokens` tokens, then adds `logit_bias`.
3. It applies the penalties: repetition, frequency, presence.
4. It divides the logits by the temperature.
5. It removes tokens by `min_p`, then by `top_k`, then by `top_p`. Equal logits stay together.
6. It draws one of the tokens that are left. With temperature 0 it takes the likeliest token after step 3.

The random number of a draw depends on the seed, the token's position and the token alone. So a request with a seed gets
the same numbers in any batch. Logprobs are those of the logits before step 1.

## Tokens that are allowed or not

`allowed_token_ids` and `bad_words` become biases that no noise outweighs. `allowed_token_ids` has a few hundred ids at
most, or leaves out a few hundred. With penalties, only the latter works. A bad word of several tokens becomes an
automaton: the text contains the word nowhere.

## Logprobs of chosen tokens

`logprob_token_ids` names up to 20 tokens. Each position has their logprobs and the sampled token's, instead of the top
tokens'. A classifier so reads the probability of each label. `logprobs` must be set.

```sh
curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{
  "prompt": "Is snow white? Answer:", "max_tokens": 1, "logprobs": 1, "logprob_token_ids": [3311, 1770]}'
```

The named tokens take places among the entries of `logit_bias`. Beam search answers 400.

## Length of the reasoning

`thinking_token_budget` ends the reasoning after this number of tokens: the sampler then chooses the end marker, such as
`</think>`. The answer follows. 0 ends it at once, -1 is no limit.

- The model needs a [reasoning parser](parsers.md), and tags of one token each. Others answer 400.
- The budget holds for the first reasoning of an answer. `max_tokens` limits both together.
- Logprobs of the end marker are the model's own.

## Beam search

`use_beam_search` in a chat or completion searches for the likeliest answers instead of sampling one, as in vLLM.

```sh
curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{
  "prompt": "The capital of France is", "use_beam_search": true, "n": 4, "max_tokens": 16}'
```

| field | meaning |
|---|---|
| `n` | number of beams, and of answers: at most 10, since a step looks at twice as many tokens |
| `best_of` | number of beams, if only the `n` best of them are wanted |
| `length_penalty` | Answers are ranked by logprob divided by length (with the prompt) to this power: 1 |
| `early_stopping` | End when as many answers as beams are complete. Otherwise the search goes on to `max_tokens`. |

The frontend runs the search, one token at a time. The prefix cache holds what precedes each token, so a server without
one answers 400. A step waits in the queue like any request, and each of its sequences counts in the metrics.

- The answer comes at the end: `stream` gets 400.
- Fields that only steer chance, such as `temperature` and `seed`, have no effect.
- Other fields that a search cannot keep to get 400: `stop`, penalties, `logit_bias`, structured outputs, forced calls.
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
