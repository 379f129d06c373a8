# SPDX-License-Identifier: Apache-2.0
"""Small models, and the many ways in which a stranger's file of one may be wrong."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit, setrlimit
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from blink.errors import ConfigError
from blink.models.weights.gguf_header import HeaderReader, map_gguf

NUMBERS = [0, 1, 2, 3, 7, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]
VALUES: list[Any] = [0, 1, -1, 3, 2**24, 2**31 - 1, 2**62, 0.0, 1e-300, 1e300, float("nan"), float("inf"), -0.5]
VALUES += [True, False, "", "gpt2", "x" * 300, "\n{% for", [], [0], [-1, 2**40], ["a", "b c"], [[]], [1.5], None]
TOKENS = ["<s>", "</s>", "a", "b", "c", "ab", "abc", "Ġ"]
MERGES = ["a b", "ab c"]
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "eos_token_id": [1],
    "sliding_window": None,
    "head_dim": None,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "tie_word_embeddings": True,
}

MXFP4_CONFIG: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "sliding_window": 16,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}


DIRECTORY_KINDS = ("llama", "gpt_oss")  # of which the latter has experts in MXFP4
GGUF_KINDS = ("llama", "gemma3")  # with a byte-level tokenizer, and with one of SentencePiece
PIECES = ["<unk>", "<s>", "</s>", "<0x41>", "▁", "a", "b", "ab"]


def make_weights() -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    """Return each tensor by its name in GGUF, with its name in Hugging Face's files."""
    shapes = {
        "token_embd": ("model.embed_tokens", (8, 32)),
        "output_norm": ("model.norm", (32,)),
        "blk.0.attn_norm": ("model.layers.0.input_layernorm", (32,)),
        "blk.0.attn_q": ("model.layers.0.self_attn.q_proj", (32, 32)),
        "blk.0.attn_k": ("model.layers.0.self_attn.k_proj", (16, 32)),
        "blk.0.attn_v": ("model.layers.0.self_attn.v_proj", (16, 32)),
        "blk.0.attn_output": ("model.layers.0.self_attn.o_proj", (32, 32)),
        "blk.0.ffn_norm": ("model.layers.0.post_attention_layernorm", (32,)),
        "blk.0.ffn_gate": ("model.layers.0.mlp.gate_proj", (32, 32)),
        "blk.0.ffn_up": ("model.layers.0.mlp.up_proj", (32, 32)),
        "blk.0.ffn_down": ("model.layers.0.mlp.down_proj", (32, 32)),
    }
    rng = np.random.default_rng(35)
    return {name: (other, rng.standard_normal(shape, np.float32)) for name, (other, shape) in shapes.items()}


def write_gguf(path: Path, kind: str = "llama") -> None:
    """Write a small model with a tokenizer, by the gguf package."""
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    (_add_sentencepiece if kind == "gemma3" else _add_byte_level)(writer)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    writer.add_custom_alignment(32)
    writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))
    weights = {name: values for name, (_, values) in make_weights().items()}
    if kind == "gemma3":
        weights |= {f"blk.0.{name}": np.ones(32, np.float32) for name in ("post_attention_norm", "post_ffw_norm")}
        weights |= {f"blk.0.{name}": np.ones(8, np.float32) for name in ("attn_q_norm", "attn_k_norm")}
    for name, values in weights.items():
        stored = gguf.GGMLQuantizationType.Q4_1 if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_mxfp4_weights() -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of a gpt-oss of the same sizes."""
    weights = {f"{name}.weight": values for name, values in make_weights().values() if ".mlp." not in name}
    weights |= {
        f"model.layers.0.self_attn.{name}_proj.bias": np.ones(size, np.float32)
        for name, size in (("q", 32), ("k", 16), ("v", 16), ("o", 32))
    }
    weights["model.layers.0.self_attn.sinks"] = np.ones(4, np.float32)
    weights["model.layers.0.mlp.router.weight"] = np.ones((2, 32), np.float32)
    weights["model.layers.0.mlp.router.bias"] = np.ones(2, np.float32)
    for name, rows in (("gate_up_proj", 64), ("down_proj", 32)):
        place = f"model.layers.0.mlp.experts.{name}"
        weights[f"{place}_blocks"] = np.full((2, rows, 1, 16), 0x5A, np.uint8)
        weights[f"{place}_scales"] = np.full((2, rows, 1), 122, np.uint8)
        weights[f"{place}_bias"] = np.ones((2, rows), np.float32)
    return weights


def write_directory(path: Path, kind: str = "llama") -> None:
    """Write the same model as a Hugging Face directory of two shards, with a tokenizer; or a gpt-oss of its sizes."""
    path.mkdir(exist_ok=True)
    weights, config = {f"{name}.weight": values for name, values in make_weights().values()}, CONFIG
    if kind == "gpt_oss":
        weights, config = make_mxfp4_weights(), CONFIG | MXFP4_CONFIG
    names = sorted(weights)
    owners: dict[str, str] = {}
    for shard, part in (("one.safetensors", names[:5]), ("two.safetensors", names[5:])):
        save_file({name: weights[name] for name in part}, path / shard)
        owners.update(dict.fromkeys(part, shard))
    merges = [(left, right) for left, right in (merge.split() for merge in MERGES)]
    bpe = models.BPE({token: index for index, token in enumerate(TOKENS)}, merges)
    files: dict[str, Any] = {
        "model.safetensors.index.json": {"metadata": {}, "weight_map": owners},
        "config.json": config,
        "generation_config.json": {"eos_token_id": 1, "temperature": 0.6, "top_k": 20},
        "tokenizer_config.json": {
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
            "chat_template": "{{ bos_token }}",
        },
        "tokenizer.json": json.loads(Tokenizer(bpe).to_str()),
    }
    for name, values in files.items():
        (path / name).write_text(json.dumps(values))


def _add_byte_level(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 4])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)


def _add_sentencepiece(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(16)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(PIECES)
    writer.add_token_scores([0.0, 0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0])
    writer.add_token_types([2, 3, 3, 6, 1, 1, 1, 1])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(False)


class Surveyor(HeaderReader):
    """Reads a header and notes where its numbers and values lie."""

    def __init__(self, path: Path) -> None:
        with map_gguf(path) as data:
            super().__init__(data, path)
            self.numbers: list[tuple[int, int]] = []  # place and size
            self.values: list[tuple[int, int]] = []  # start (of the kind) and end
            self.read_pairs()
            self.pairs_end = self.offset
            self.read_tensor_infos()

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self.numbers.append((self._offset, size))
        return super()._scalar(code)

    def _value(self, kind: int) -> Any:
        start = self._offset - 4
        value = super()._value(kind)
        self.values.append((start, self._offset))
        return value


def encode(value: Any) -> bytes:
    """Return the kind and the bytes of a value in a GGUF header."""
    if value is None:
        return struct.pack("<IQ", 99, 0)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Iq", 11, value)
    if isinstance(value, float):
        return struct.pack("<Id", 12, value)
    if isinstance(value, str):
        return struct.pack("<IQ", 8, len(value.encode())) + value.encode()
    bodies = [encode(item) for item in value]
    kind = bodies[0][:4] if bodies else struct.pack("<I", 4)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(value)) + b"".join(body[4:] for body in bodies)


def nest(depth: int) -> bytes:
    """Return an array of an array of ..."""
    return struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 0)


class GgufMutator:
    """Makes damaged copies of one file."""

    def __init__(self, path: Path) -> None:
        self._survey = Surveyor(path)
        self._header = path.read_bytes()[: self._survey.offset] if path.stat().st_size > 1 << 20 else path.read_bytes()
        self._data_start = -(-self._survey.offset // 32) * 32

    def mutate(self, rng: random.Random) -> bytes:
        """Return the next damaged copy."""
        chosen = rng.choice(
            [self._truncate, self._flip, self._number, self._number, self._value, self._value, self._extend]
        )
        return chosen(rng)

    def _truncate(self, rng: random.Random) -> bytes:
        return self._header[: rng.randrange(len(self._header))]

    def _flip(self, rng: random.Random) -> bytes:
        data = bytearray(self._header)
        for _ in range(rng.choice([1, 1, 2, 8])):
            data[rng.randrange(min(len(data), self._survey.offset))] = rng.randrange(256)
        return bytes(data)

    def _number(self, rng: random.Random) -> bytes:
        """Change a version, count, length, type, dimension, offset or value."""
        data = bytearray(self._header)
        for _ in range(rng.choice([1, 1, 2])):
            place, size = rng.choice(self._survey.numbers)
            number = rng.choice([*NUMBERS, rng.randrange(40), len(data)]) % 2 ** (8 * size)
            data[place : place + size] = number.to_bytes(size, "little")
        return bytes(data)

    def _value(self, rng: random.Random) -> bytes:
        start, end = rng.choice(self._survey.values)
        return self._splice(
            start, end, nest(rng.choice([1, 4, 5, 3000])) if rng.random() < 0.1 else encode(rng.choice(VALUES))
        )

    def _extend(self, rng: random.Random) -> bytes:
        """Add a pair: one more of a key that is there, or one that is read only if present."""
        keys = ["general.architecture", "general.alignment", "llama.expert_count", "llama.rope.scaling.type"]
        keys += ["llama.attention.sliding_window", "tokenizer.ggml.unk_token_id", "tokenizer.ggml.eot_token_id", ""]
        key = rng.choice(keys).encode()
        pair = struct.pack("<Q", len(key)) + key + encode(rng.choice(VALUES))
        data = self._splice(self._survey.pairs_end, self._survey.pairs_end, pair)
        return data[:16] + (int.from_bytes(data[16:24], "little") + 1).to_bytes(8, "little") + data[24:]

    def _splice(self, start: int, end: int, new: bytes) -> bytes:
        header = self._header[:start] + new + self._header[end : self._survey.offset]
        return header + bytes(-len(header) % 32) + self._header[self._data_start :]


def mutate_directory(path: Path, rng: random.Random) -> None:
    """Damage one file of a model directory."""
    file = rng.choice(sorted(path.iterdir()))
    data = bytearray(file.read_bytes())
    if file.suffix == ".json" and rng.random() < 0.7:
        values = json.loads(data)
        mutate_json(values, rng)
        file.write_text(json.dumps(values))
        return
    header_bytes = min(len(data), 800)
    if rng.random() < 0.3:
        file.write_bytes(data[: rng.randrange(header_bytes)])
        return
    if rng.random() < 0.1:
        file.write_text("[" * 100_000 if rng.random() < 0.5 else '{"a":' * 100_000)
        return
    for _ in range(rng.choice([1, 1, 4])):
        data[rng.randrange(header_bytes)] = rng.randrange(256)
    file.write_bytes(data)


def mutate_json(values: Any, rng: random.Random) -> None:
    """Replace one value somewhere in what JSON holds."""
    while True:
        key = rng.choice(sorted(values)) if isinstance(values, dict) else rng.randrange(len(values))
        inner = values[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
            values[key] = rng.choice([*VALUES, 10**400, {}, {"content": 3}, {"a": [1]}])
            return
        values = inner


@contextmanager
def memory_limit(margin: int) -> Iterator[None]:
    """Let the process take at most `margin` bytes more of address space than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = getrlimit(RLIMIT_AS)
    setrlimit(RLIMIT_AS, (pages * 4096 + margin, hard))
    try:
        yield
    finally:
        with suppress(ValueError):
            setrlimit(RLIMIT_AS, (soft if soft != RLIM_INFINITY else hard, hard))


def assert_one_line(error: ConfigError) -> None:
    """An error is one line that is not too long to read."""
    assert "\n" not in error.message
    assert len(error.message) < 1000, error.message
