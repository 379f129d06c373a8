# SPDX-License-Identifier: Apache-2.0
"""Tune a model of 4 bits so that it predicts what the original does, all layers together, by gradients.

Trained are the codes, the scales and the norms' weights. Codes are rounded in each step while their gradients pass
through. The loss is the divergence of the predictions of all tokens from those of the original, which so is the only
teacher.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor
from tqdm import tqdm

from blink.formats.matrix import QuantizedMatrix
from blink.models.spec import ModelSpec
from blink.quantize.differentiable import compute_logits
from blink.quantize.rounding import INT4_MAX, make_storable

logger = logging.getLogger("blink.quantize")

_REST = 0.25  # how far a code may lie from its whole number at first, towards the weight before rounding
_WARMUP = 0.05  # of the steps
_KEPT = 32  # one text in so many is not learnt from


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to tune."""

    steps: int
    texts: int = 8  # of a step
    code_rate: float = 5e-3  # what Adam moves at most in a step: in codes
    gain_rate: float = 2e-3  # in parts of a scale or of a norm's weight
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Rounded:
    """A model before and after its matrices were rounded."""

    exact: Mapping[str, Tensor]  # the matrices before
    others: Mapping[str, Tensor]  # what is not rounded, in the types in which it is stored
    matrices: Mapping[str, QuantizedMatrix]  # those of 4 bits have groups of one size

    def weights(self, device: torch.device) -> dict[str, Tensor]:
        """Return all weights as they were before, in float32."""
        return {name: weight.to(device, torch.float32) for name, weight in {**self.exact, **self.others}.items()}


def tune(
    spec: ModelSpec, model: Rounded, texts: Tensor, recipe: Recipe
) -> tuple[dict[str, QuantizedMatrix], dict[str, Tensor]]:
    """Return a model's matrices and norms, tuned by texts [number, tokens], some of which only measure the result."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    exact = model.weights(device)
    student = Student(model, exact)
    tuner = Tuner(spec, exact, student)
    num_kept = max(len(texts) // _KEPT, 1)
    kept, taken = texts[:num_kept], texts[num_kept:]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        before = tuner.measure(kept)
        tuner.tune(taken, recipe)
        after = tuner.measure(kept)
    finally:
        torch.set_float32_matmul_precision(precision)
    logger.info("divergence from the model's own predictions: %.4f nats per token, tuned %.4f", before, after)
    return student.finish()


class Student:
    """A model of 4 bits, its matrices as rows of one group each, with the gradients of what is tuned.

    Matrices that are not of 4 bits stay as they are.
    """

    def __init__(self, model: Rounded, exact: Mapping[str, Tensor]) -> None:
        """Begin with the rounded matrices; exact: the weights before, in float32, on the device that computes."""
        device = next(iter(exact.values())).device
        self._matrices = {name: matrix for name, matrix in model.matrices.items() if matrix.zeros is not None}
        self._others = {name: matrix for name, matrix in model.matrices.items() if matrix.zeros is None}
        self._fixed = {name: exact[name] for name in model.others} | {
            name: matrix.dequantize(torch.float32).to(device) for name, matrix in self._others.items()
        }
        self._norms = {name: exact[name] for name in model.others if name.endswith("norm.weight")}
        self._norm_types = {name: model.others[name].dtype for name in self._norms}
        self._scales = _join((matrix.scales for matrix in self._matrices.values()), 1, device)
        self._zeros = _join((matrix.zeros for matrix in self._matrices.values()), 1, device)
        width = next(iter(self._matrices.values())).group
        values = _join((matrix.values for matrix in self._matrices.values()), width, device)
        places = _join((exact[name] for name in self._matrices), width, device)
        places.div_(self._scales).add_(self._zeros).sub_(values).clamp_(-_REST, _REST)
        self.codes = places.add_(values)  # [groups, width]
        self.gains = torch.zeros_like(self._scales)  # logarithms of what scales are multiplied by
        self.norm_gains = {name: torch.zeros_like(weight) for name, weight in self._norms.items()}
        self._rounded = torch.empty_like(self.codes)
        self._leaves: dict[str, Tensor] = {}

    @property
    def parameters(self) -> list[Tensor]:
        """What is trained: codes, gains, and the gains of norms."""
        return [self.codes, self.gains, *self.norm_gains.values()]

    def weights(self) -> dict[str, Tensor]:
        """Return all weights as they would be stored now; those that are trained collect gradients."""
        torch.round(self.codes, out=self._rounded).clamp_(0, INT4_MAX).sub_(self._zeros).mul_(self._stored_scales())
        self._leaves = {name: self._stored_norm(name) for name in self._norms} | self._split(self._rounded)
        for leaf in self._leaves.values():
            leaf.requires_grad_()
        return {**self._fixed, **self._leaves}

    def collect(self) -> None:
        """Make the parameters' gradients of those of the weights."""
        found = torch.cat([_gradient(self._leaves[name]).view(-1, self.codes.shape[1]) for name in self._matrices])
        self.gains.grad = (found * self._rounded).sum(1, keepdim=True)
        self.codes.grad = found.mul_(self._stored_scales())
        for name, gain in self.norm_gains.items():
            gain.grad = _gradient(self._leaves[name]) * self._leaves[name].detach()

    def limit(self) -> None:
        """Keep the codes where rounding finds a number of 4 bits."""
        self.codes.clamp_(0, INT4_MAX)

    def finish(self) -> tuple[dict[str, QuantizedMatrix], dict[str, Tensor]]:
        """Return the matrices and the norms' weights as they are stored."""
        codes = self._split(self.codes.round().clamp_(0, INT4_MAX).to(torch.uint8))
        scales = self._stored_scales().split([matrix.scales.numel() for matrix in self._matrices.values()])
        found = {
            name: QuantizedMatrix(codes[name].cpu(), part.view_as(matrix.scales).cpu(), matrix.zeros)
            for (name, matrix), part in zip(self._matrices.items(), scales, strict=True)
        }
        norms = {name: self._stored_norm(name).to(kind).cpu() for name, kind in self._norm_types.items()}
        return {**found, **self._others}, norms

    def _stored_scales(self) -> Tensor:
        return make_storable(self._scales * self.gains.exp())

    def _stored_norm(self, name: str) -> Tensor:
        return (self._norms[name] * self.norm_gains[name].exp()).to(self._norm_types[name]).float()

    def _split(self, rows: Tensor) -> dict[str, Tensor]:
        """Return matrices of rows that are groups."""
        parts = rows.split([matrix.scales.numel() for matrix in self._matrices.values()])
        return {
            name: part.view(matrix.values.shape)
            for (name, matrix), part in zip(self._matrices.items(), parts, strict=True)
        }


class Tuner:
    """A student and its teacher, the model before rounding."""

    def __init__(self, spec: ModelSpec, exact: Mapping[str, Tensor], student: Student) -> None:
        """Take the teacher's weights, all in float32, on the device that is to compute."""
        self._spec = spec
        self._exact = exact
        self.student = student
        self._device = student.codes.device
        # Logits of all tokens of the texts that run at once are held several times.
        self._texts_at_once = 8 if self._device.type == "cuda" else 1

    @torch.no_grad()
    def measure(self, texts: Tensor) -> float:
        """Return the divergence (nats per token) of the student's predictions from the teacher's on texts."""
        weights = self.student.weights()
        parts = texts.split(self._texts_at_once)
        return sum(float(self._diverge(weights, part)) for part in parts) / texts.numel()

    def tune(self, texts: Tensor, recipe: Recipe) -> None:
        """Tune the student by texts [number, tokens], which are taken in a random order, again and again."""
        student = self.student
        optimizer = torch.optim.Adam(
            [
                {"params": [student.codes], "lr": recipe.code_rate},
                {"params": student.parameters[1:], "lr": recipe.gain_rate},
            ],
            betas=(0.9, 0.95),
            fused=True,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, recipe.steps))
        order = _draw(len(texts), recipe)
        for chosen in tqdm(order, desc="tuning", unit=" steps", disable=None):
            self._take_gradients(texts[chosen])
            optimizer.step()
            student.limit()
            schedule.step()

    def _take_gradients(self, texts: Tensor) -> None:
        weights = self.student.weights()
        for part in texts.split(self._texts_at_once):
            (self._diverge(weights, part) / texts.numel()).backward()
        self.student.collect()

    def _diverge(self, weights: Mapping[str, Tensor], texts: Tensor) -> Tensor:
        """Return the sum over all tokens."""
        ids = texts.to(self._device)
        with torch.no_grad():
            expected = compute_logits(self._spec, self._exact, ids).log_softmax(-1)
        found = compute_logits(self._spec, weights, ids).log_softmax(-1)
        return functional.kl_div(found, expected, reduction="sum", log_target=True)


def _rate(step: int, steps: int) -> float:
    """Return the learning rate's factor: it rises for a moment, then falls to nothing."""
    return min((step + 1) / (_WARMUP * steps), 1 - step / steps, 1.0)


def _draw(count: int, recipe: Recipe) -> Tensor:
    """Return which texts each step takes [steps, texts]: all of them before one comes again."""
    generator = torch.Generator().manual_seed(recipe.seed)
    wanted = recipe.steps * recipe.texts
    rounds = [torch.randperm(count, generator=generator) for _ in range(-(-wanted // count))]
    return torch.cat(rounds)[:wanted].view(recipe.steps, recipe.texts)


def _join(tensors: Iterable[Tensor | None], width: int, device: torch.device) -> Tensor:
    """Return tensors in float32 as rows of one width, one below the other."""
    return torch.cat([tensor.to(device, torch.float32).view(-1, width) for tensor in tensors if tensor is not None])


def _gradient(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad
