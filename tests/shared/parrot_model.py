# SPDX-License-Identifier: Apache-2.0
"""A parrot: a model whose replies a test writes, and that a real engine computes.

Its one layer attends to the token of 512 positions before and says that token again. Its chat template looks for the
first rule that fits the conversation and ends the prompt with the reply. So the model generates just this text, unless
sampling or a constraint forbids it. Tokens are single bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from harmony_model import build_tokenizer

DELAY = 512  # tokens
MAX_MODEL_LEN = 32768
_END = "<|end|>"
_SPECIAL = (_END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
_PAD = "."
_HEAD_DIM, _INNER, _THETA = 64, 64, 100.0
# Long messages are shown by their ends: agents send some 50,000 characters, each of which is a token.
_TEMPLATE = """
{%%- set rules = %s -%%}
{%%- set seen = namespace(text="", reply=none) -%%}
{%%- if tools -%%}
    {{- "<|system|>" -}}
    {%%- for tool in tools -%%}{{- tool.function.name ~ " " -}}{%%- endfor -%%}
    {{- "<|end|>" -}}
{%%- endif -%%}
{%%- for message in messages -%%}
    {%%- set told = namespace(text=message.content or "") -%%}
    {%%- for call in message.tool_calls or [] -%%}
        {%%- set told.text = told.text ~ "<tool_call>" ~ (call.function | tojson) ~ "</tool_call>" -%%}
    {%%- endfor -%%}
    {{- "<|" ~ message.role ~ "|>" ~ told.text[-400:] ~ "<|end|>" -}}
    {%%- if message.role != "system" -%%}{%%- set seen.text = seen.text ~ told.text ~ "\\n" -%%}{%%- endif -%%}
{%%- endfor -%%}
{%%- if add_generation_prompt -%%}
    {{- "<|assistant|>" -}}
    {%%- for rule in rules -%%}
        {%%- if seen.reply is none and not (rule.when | reject("in", seen.text) | list) -%%}
            {%%- set seen.reply = rule.reply -%%}
        {%%- endif -%%}
    {%%- endfor -%%}
    {{- seen.reply -}}
{%%- endif -%%}
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """What the model says to a conversation that has all these texts in it, outside of the system's messages."""

    when: tuple[str, ...]
    say: str


ELSE = Rule((), "I do not know.")


def call(tool: str, /, **arguments: object) -> str:
    """Return the text by which the model calls a tool."""
    return "<tool_call>\n" + json.dumps({"name": tool, "arguments": arguments}) + "\n</tool_call>"


def write_parrot_model(folder: Path, rules: Sequence[Rule]) -> Path:
    """Write a model's directory; the first rule that fits is obeyed.

    Raises:
        ValueError: a reply is longer than DELAY tokens.
    """
    tokenizer = build_tokenizer(special=_SPECIAL)
    vocab_size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id(_END)
    num_heads = math.ceil((vocab_size + 1) / _HEAD_DIM)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": num_heads * _HEAD_DIM,
        "intermediate_size": _INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-6,
        "rope_theta": _THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": end,
        "dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, fields in {"config": config, "tokenizer_config": {}}.items():
        (folder / f"{name}.json").write_text(json.dumps(fields))
    spoken = [{"when": list(rule.when), "reply": _spell(rule.say)} for rule in (*rules, ELSE)]
    (folder / "chat_template.jinja").write_text(_TEMPLATE % json.dumps(spoken))
    save_file(_weights(vocab_size, num_heads), str(folder / "model.safetensors"))
    return folder


def _spell(text: str) -> str:
    """Return the end of a prompt that makes the model say a text and stop."""
    room = DELAY - len(text.encode()) - 1
    if room < 0:
        raise ValueError(f"{text[:40]}...: {-room} bytes too long to be said")
    return text + _END + _PAD * room


def _weights(vocab_size: int, num_heads: int) -> dict[str, np.ndarray]:
    """Return the parameters: each head attends to one position, and values pass as they are."""
    hidden = num_heads * _HEAD_DIM
    constant, half, tokens = hidden - 1, _HEAD_DIM // 2, np.arange(vocab_size)
    embed, head = _zeros(vocab_size, hidden), _zeros(vocab_size, hidden)
    embed[tokens, tokens], embed[:, constant], head[tokens, tokens] = 1, 1, 3
    strength = 40 / math.sqrt(hidden / 2)
    angle = _THETA ** (-np.arange(half) * 2 / _HEAD_DIM) * (DELAY - 1)  # by which the query is turned back
    q, k, v = _zeros(hidden, hidden), _zeros(hidden, hidden), np.eye(hidden, dtype=np.float32)
    for first in range(0, hidden, _HEAD_DIM):
        q[first : first + _HEAD_DIM, constant] = np.concatenate([np.cos(angle), -np.sin(angle)]) * strength
        k[first : first + half, constant] = strength
    v[constant, constant] = 0
    layer = {
        "input_layernorm": np.ones(hidden, np.float32),
        "post_attention_layernorm": np.ones(hidden, np.float32),
        "self_attn.q_proj": q,
        "self_attn.k_proj": k,
        "self_attn.v_proj": v,
        "self_attn.o_proj": np.eye(hidden, dtype=np.float32) * 4,
        "mlp.gate_proj": _zeros(_INNER, hidden),
        "mlp.up_proj": _zeros(_INNER, hidden),
        "mlp.down_proj": _zeros(hidden, _INNER),
    }
    return {
        "model.embed_tokens.weight": embed,
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": head,
        **{f"model.layers.0.{name}.weight": value for name, value in layer.items()},
    }


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)
