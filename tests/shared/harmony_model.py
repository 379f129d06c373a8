# SPDX-License-Identifier: Apache-2.0
"""A tiny gpt-oss: a tokenizer of single bytes with the format's special tokens, and a chat template with its rules.

The template is written for these tests, after what the published one does: openai/gpt-oss-20b, chat_template.jinja,
Apache-2.0. It has that one's refusals and omissions, and its own short way to describe tools.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from blink.text.message.harmony import MARKS

SPECIAL_TOKENS = ("<|startoftext|>", "<|endoftext|>", *MARKS)
TEMPLATE = """
{%- macro describe(tool) -%}
{{ "// " + tool.description + "\\ntype " + tool.name + " = (_: " + (tool.parameters or {}) | tojson + ") => any;\\n" }}
{%- endmacro -%}
{{ "<|start|>system<|message|>" + (model_identity if model_identity is defined else "You are a test.") }}
{{- "\\nCurrent date: " + strftime_now("%Y-%m-%d") }}
{{- "\\nReasoning: " + (reasoning_effort if reasoning_effort is defined else "medium") }}
{%- if builtin_tools %}{{ "\\nTools: " + builtin_tools | join(", ") }}{% endif %}
{{- "\\n# Valid channels: analysis, commentary, final.<|end|>" }}
{%- set told = messages[0].role in ("developer", "system") %}
{%- set turns = messages[1:] if told else messages %}
{%- if (told and messages[0].content) or tools %}
    {{- "<|start|>developer<|message|>" + (messages[0].content if told else "") }}
    {%- for tool in tools or [] %}{{ "\\n" + describe(tool.function) }}{% endfor %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in turns %}
    {%- if message.role == "assistant" and "tool_calls" in message %}
        {%- set later = namespace(final=false) %}
        {%- for other in turns[loop.index:] %}
            {%- if other.role == "assistant" and "tool_calls" not in other %}{% set later.final = true %}{% endif %}
        {%- endfor %}
        {%- if message.content and message.thinking %}{{ raise_exception("content and thinking") }}{% endif %}
        {%- set thought = message.content or message.thinking %}
        {%- if thought and not later.final %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + thought + "<|end|>" }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
        {{- call.arguments | tojson + "<|call|>" }}
        {%- set last.name = call.name %}
    {%- elif message.role == "assistant" and loop.last and not add_generation_prompt %}
        {%- if "thinking" in message %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
        {%- endif %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
    {%- elif message.role == "assistant" %}
        {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- set last.name = none %}
    {%- elif message.role == "tool" %}
        {%- if last.name is none %}{{ raise_exception("a result without a call") }}{% endif %}
        {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content | tojson + "<|end|>" }}
    {%- elif message.role == "user" %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif %}
"""
_CONFIG = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}


def build_tokenizer(*, special: tuple[str, ...] = SPECIAL_TOKENS) -> Tokenizer:
    """Return a tokenizer whose token of each byte has the byte's rank in the byte-level alphabet as its id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: rank for rank, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return tokenizer


def write_harmony_model(folder: Path, *, special: tuple[str, ...] = SPECIAL_TOKENS, template: str = TEMPLATE) -> Path:
    """Write all that a frontend reads, and a config for random weights (load_format "dummy")."""
    tokenizer = build_tokenizer(special=special)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {"eos_token_id": tokenizer.token_to_id("<|endoftext|>")}
    files = {"config.json": {**_CONFIG, **ends, "vocab_size": tokenizer.get_vocab_size()}, "tokenizer_config.json": {}}
    for name, fields in {**files, "generation_config.json": ends}.items():
        (folder / name).write_text(json.dumps(fields))
    (folder / "chat_template.jinja").write_text(template)
    return folder
