# SPDX-License-Identifier: Apache-2.0
"""Other weights in the form of a checkpoint's, whatever it is quantized to, and what tells one from the other."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from blink import LLM, SamplingParams, TokensPrompt

PROMPT = TokensPrompt(prompt_token_ids=[5, 9, 30, 31, 32] * 5)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_KEPT = "g_idx", "weight_shape"  # what describes a matrix


def turn_weights(source: Path, target: Path) -> Path:
    """Copy a model with the rows of each tensor in the opposite order."""
    shutil.copytree(source, target)
    for path in target.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.ndim > 0 and not name.endswith(_KEPT):
                tensors[name] = tensor.view(_WORDS[tensor.itemsize]).flip(0).contiguous().view(tensor.dtype)
        save_file(tensors, path)
    return target


def generate(llm: LLM) -> list[int]:
    """Return the tokens behind PROMPT, by which weights are told apart."""
    (output,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    return list(output.outputs[0].token_ids)


def drop_tensor(source: Path, target: Path, name: str) -> Path:
    """Copy a model without the tensors whose names have a part."""
    turn_weights(source, target)
    for path in target.glob("*.safetensors"):
        tensors = load_file(path)
        kept = {key: tensor for key, tensor in tensors.items() if name not in key}
        if len(kept) < len(tensors):
            save_file(kept or {"nothing": torch.zeros(1)}, path)
    return target
