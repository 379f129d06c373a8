# SPDX-License-Identifier: Apache-2.0
"""The tests' own tokenizer, as a model's directory and as a GGUF file of the default model's shape without weights."""

from __future__ import annotations

import json
import math
import os
from copy import copy
from pathlib import Path

import gguf
import numpy as np

from blink.config import FrontendConfig, ModelConfig
from blink.text.assets import ModelAssets, load_assets
from blink.text.tokenizer import Tokenizer
from make_tokenizer import FOLDER

MODEL = ModelConfig(model=str(FOLDER))
# The default model's vocabulary has no token for these, and so the file has none.
MISSING = "\x04\x06\x13\x14\x16\x1d"

_NUM_LAYERS, _HIDDEN, _INNER, _KEYS, _NUM_TOKENS = 30, 576, 1536, 192, 49152
_MATRICES = {
    "attn_q": (_HIDDEN, _HIDDEN),
    "attn_k": (_KEYS, _HIDDEN),
    "attn_v": (_KEYS, _HIDDEN),
    "attn_output": (_HIDDEN, _HIDDEN),
    "ffn_gate": (_INNER, _HIDDEN),
    "ffn_up": (_INNER, _HIDDEN),
    "ffn_down": (_HIDDEN, _INNER),
}
Kind = gguf.GGMLQuantizationType


def load_small_assets() -> ModelAssets:
    """Load the tokenizer, its chat template and its end token."""
    return load_assets(FrontendConfig(model=MODEL))


def with_names(tokenizer: Tokenizer, names: dict[str, int]) -> Tokenizer:
    """Return a tokenizer some of whose tokens have other names: these alone are found."""
    other = copy(tokenizer)
    vars(other)["token_id"] = names.get
    return other


def write_hollow_gguf(path: Path) -> None:
    """Write a file with the default model's sizes and types, this tokenizer, and a hole where the weights are."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Small tokenizer")
    writer.add_languages(["en"])
    writer.add_block_count(_NUM_LAYERS)
    writer.add_context_length(8192)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(9)
    writer.add_head_count_kv(3)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(_NUM_TOKENS)
    writer.add_rope_dimension_count(64)
    _add_tokenizer(writer)
    _add_tensor(writer, "token_embd", (_NUM_TOKENS, _HIDDEN), Kind.Q8_0)
    _add_tensor(writer, "output_norm", (_HIDDEN,), Kind.F32)
    for layer in range(_NUM_LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            _add_tensor(writer, f"blk.{layer}.{name}", (_HIDDEN,), Kind.F32)
        for name, shape in _MATRICES.items():
            _add_tensor(writer, f"blk.{layer}.{name}", shape, Kind.Q4_1)
    num_bytes = sum(info.nbytes for info in writer.tensors[0].values())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    alignment = gguf.GGUF_DEFAULT_ALIGNMENT
    os.truncate(path, -(-path.stat().st_size // alignment) * alignment + num_bytes)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Write the tokenizer's tokens, and as many that nothing makes as the vocabulary has places."""
    values = json.loads((FOLDER / "tokenizer.json").read_text())
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    ids = values["model"]["vocab"]
    tokens = [*sorted(ids, key=ids.__getitem__), *(f"[unused{place}]" for place in range(len(ids), _NUM_TOKENS))]
    for letter in MISSING:
        place = ids[chr(0x100 + ord(letter))]  # as byte-level tokenizers write control characters
        tokens[place] = f"[unused{place}]"
    special = {token["id"] for token in values["added_tokens"]}
    kinds = [gguf.TokenType.CONTROL if place in special else gguf.TokenType.NORMAL for place in range(_NUM_TOKENS)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in values["model"]["merges"]])
    writer.add_bos_token_id(ids[config["bos_token"]])
    writer.add_eos_token_id(ids[config["eos_token"]])
    writer.add_unk_token_id(ids[config["unk_token"]])
    writer.add_pad_token_id(ids[config["eos_token"]])
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(config["chat_template"])


def _add_tensor(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: Kind) -> None:
    """Announce a tensor, which is then not written."""
    values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    total = math.prod(shape) // values * num_bytes
    writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.float32), total, raw_dtype=kind)
