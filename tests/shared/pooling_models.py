# SPDX-License-Identifier: Apache-2.0
"""Small models that pool: as Qwen3-Embedding's and Qwen3-Reranker's files are, with random weights in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification, Qwen3Model

from make_tokenizer import FOLDER, VOCAB_SIZE

HIDDEN = 64
END = 0  # <|endoftext|>, with which every embedded text ends
NO, YES = VOCAB_SIZE, VOCAB_SIZE + 1
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE + 8,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_theta": 1e6,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": 0,
}
_PART = "sentence_transformers.models."


def save_embedder(path: Path, mode: str = "lasttoken", *, normalize: bool = True, **changes: Any) -> Any:
    """Write an embedding model with the modules of sentence-transformers, and return transformers' model.

    mode: of pooling, as 1_Pooling/config.json says it. The tensors' names lack "model.", and the tokenizer ends texts.
    """
    model = _make(Qwen3Model, tie_word_embeddings=True, **changes)
    model.save_pretrained(path)
    _save_tokenizer(path, ends=True)
    names = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": index, "name": str(index), "path": paths[index], "type": f"{_PART}{name}"}
        for index, name in enumerate(names)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    write_pooling(path, mode)
    return model


def write_pooling(path: Path, *modes: str) -> None:
    """Write 1_Pooling/config.json with some modes on."""
    known = ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
    switches = {f"pooling_mode_{name}": name in modes for name in known}
    (path / "1_Pooling").mkdir(exist_ok=True)
    config = {"word_embedding_dimension": HIDDEN, **switches, "include_prompt": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(config))


def save_reranker(path: Path, *, converted: bool = False, tied: bool = True) -> Any:
    """Write a reranker and return transformers' model: of logits, or converted to a classifier of one label."""
    kind = Qwen3ForSequenceClassification if converted else Qwen3ForCausalLM
    model = _make(kind, tie_word_embeddings=tied, **({"num_labels": 1} if converted else {}))
    model.save_pretrained(path)
    _save_tokenizer(path, ends=False)
    return model


def _make(kind: Any, **changes: Any) -> Any:
    torch.manual_seed(5)
    model = kind(Qwen3Config(**{**_SIZES, **changes})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():  # so that no norm is 1 and no logit near 0
            weight.copy_(torch.randn_like(weight) * 0.3 + 1 if "norm" in name else torch.randn_like(weight) * 0.15)
    return model


def _save_tokenizer(path: Path, *, ends: bool) -> None:
    """Write the tests' tokenizer with the words of rerankers; `ends`: each text ends with a token of its own."""
    tokenizer = json.loads((FOLDER / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {"no": NO, "yes": YES}
    if ends:
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [END], "tokens": ["<|endoftext|>"]}},
        }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text((FOLDER / "tokenizer_config.json").read_text())


@torch.no_grad()
def embed(model: Any, tokens: list[int], mode: str = "lasttoken", *, normalize: bool = True) -> torch.Tensor:
    """Return the embedding of token ids by transformers, float32 [hidden]."""
    hidden = model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    pooled = {"lasttoken": hidden[-1], "mean_tokens": hidden.mean(0), "cls_token": hidden[0]}[mode]
    return torch.nn.functional.normalize(pooled, dim=0) if normalize else pooled


@torch.no_grad()
def score(model: Any, tokens: list[int]) -> float:
    """Return the score of a prompt by transformers: softmax of the logits of no and yes, or a classifier's sigmoid."""
    logits = model(input_ids=torch.tensor([tokens])).logits
    if logits.dim() == 3:
        return float(logits[0, -1, [NO, YES]].softmax(0)[1])
    return float(logits[0, 0].sigmoid())
