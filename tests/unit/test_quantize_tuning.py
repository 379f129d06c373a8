# SPDX-License-Identifier: Apache-2.0
"""Tuning of models of 4 bits: the decoder that is differentiated, the gradients, and what comes out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blink.errors import ConfigError
from blink.models.spec import ModelSpec
from blink.models.weights.quantized_checkpoint import is_matrix
from blink.models.weights.source import read_spec
from blink.quantize.differentiable import check_differentiable, compute_logits
from blink.quantize.rounding import Fp8Grid, Int4Grid, round_nearest
from blink.quantize.tuning import Recipe, Rounded, Student, Tuner, tune
from model_families import save_model

CPU = torch.device("cpu")
FP8_MATRIX = "model.layers.1.mlp.down_proj.weight"


def make_model(path: Path, family: str = "qwen3") -> tuple[ModelSpec, Any]:
    """Return a small random model's description, and it as transformers has it."""
    model = save_model(family, path)
    return dataclasses.replace(read_spec(path), max_model_len=32), model


def make_rounded(path: Path) -> tuple[ModelSpec, Rounded]:
    """Return a small model with matrices rounded to the nearest number of 4 bits, one to FP8."""
    spec, model = make_model(path, "llama-3.1")
    weights: dict[str, Tensor] = {name: weight.detach() for name, weight in model.named_parameters()}
    exact = {name: weight for name, weight in weights.items() if is_matrix(name)}
    others = {name: weight.bfloat16() for name, weight in weights.items() if name not in exact}
    matrices = {
        name: round_nearest(weight, Fp8Grid() if name == FP8_MATRIX else Int4Grid(32)) for name, weight in exact.items()
    }
    return spec, Rounded(exact, others, matrices)


def draw_texts(spec: ModelSpec, count: int) -> Tensor:
    return torch.randint(spec.vocab_size, (count, 24), generator=torch.Generator().manual_seed(3))


def gradient_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


@pytest.mark.parametrize("family", ["llama-3.1", "llama-biased", "qwen2-yarn", "qwen3"])
@torch.no_grad()
def test_logits_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    spec, model = make_model(tmp_path, family)
    ids = draw_texts(spec, 3)
    found = compute_logits(spec, dict(model.named_parameters()), ids)
    assert torch.allclose(found, model(ids).logits, atol=2e-4)


@pytest.mark.parametrize("family", ["gemma2", "mixtral", "phi3-short", "granite"])
def test_other_models_are_refused(tmp_path: Path, family: str) -> None:
    with pytest.raises(ConfigError, match="--tune is for models like Llama"):
        check_differentiable(make_model(tmp_path, family)[0])


def test_gradients_are_those_of_the_stored_weights(tmp_path: Path) -> None:
    _, model = make_rounded(tmp_path)
    student = Student(model, model.weights(CPU))
    weights = student.weights()
    for name, matrix in model.matrices.items():
        assert torch.equal(weights[name], matrix.dequantize(torch.float32))
    rates = {name: torch.randn_like(weight) for name, weight in weights.items()}
    torch.stack(
        [(rates[name] * weight).sum() for name, weight in weights.items() if weight.requires_grad]
    ).sum().backward()
    student.collect()
    tuned = [name for name in model.matrices if name != FP8_MATRIX]
    gradient = torch.cat([rates[name].view(-1, 32) for name in tuned])
    values = torch.cat([weights[name].detach().view(-1, 32) for name in tuned])
    scales = torch.cat([model.matrices[name].scales.view(-1, 1) for name in tuned])
    assert torch.allclose(gradient_of(student.codes), gradient * scales)
    assert torch.allclose(gradient_of(student.gains), (gradient * values).sum(1, keepdim=True))  # a gain is a logarithm
    assert not weights[FP8_MATRIX].requires_grad
    for name, gain in student.norm_gains.items():
        assert torch.equal(gradient_of(gain), rates[name] * model.others[name].float())


@pytest.mark.long
def test_tuning_brings_predictions_nearer(tmp_path: Path) -> None:
    spec, model = make_rounded(tmp_path)
    texts, unseen = draw_texts(spec, 72).split(64)
    recipe = Recipe(steps=20, code_rate=3e-2, gain_rate=3e-3)
    exact = model.weights(CPU)
    before = Tuner(spec, exact, Student(model, exact)).measure(unseen)
    matrices, norms = tune(spec, model, texts, recipe)
    assert list(norms) == [name for name in model.others if name.endswith("norm.weight")]
    tuned = Rounded(model.exact, {**model.others, **norms}, matrices)
    after = Tuner(spec, exact, Student(tuned, tuned.weights(CPU))).measure(unseen)
    assert after < before * 0.94
    for name, matrix in matrices.items():
        if name == FP8_MATRIX:
            assert matrix is model.matrices[name]
            continue
        assert matrix.values.dtype == torch.uint8 and matrix.values.max() <= 15
        assert not torch.equal(matrix.values, model.matrices[name].values)
        assert torch.equal(matrix.scales.bfloat16().float(), matrix.scales)


@pytest.mark.parametrize("steps", [3, pytest.param(20, marks=pytest.mark.long)])
def test_tuning_is_the_same_each_time(tmp_path: Path, steps: int) -> None:
    spec, model = make_rounded(tmp_path)
    texts, _ = draw_texts(spec, 72).split(64)
    recipe = Recipe(steps=steps, code_rate=3e-2, gain_rate=3e-3)
    once, again = (tune(spec, model, texts, recipe)[0] for _ in range(2))
    assert all(
        torch.equal(again[name].dequantize(torch.float32), matrix.dequantize(torch.float32))
        for name, matrix in once.items()
    )
