# SPDX-License-Identifier: Apache-2.0
"""All layers of a step of one decoding row by one kernel: csrc/gpu/decode/row_step.cuh."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from blink.kernels.batch import Batch
from blink.kernels.experts import ExpertWeights, Fp8Experts
from blink.kernels.gpu.decode.attention import Arguments as AttentionArguments
from blink.kernels.gpu.decode.attention import can_attend, make_arguments
from blink.kernels.gpu.decode.launch import address, can_multiply_groups, compile_kernel, launch
from blink.kernels.gpu.decode.splits import TILE_KEYS
from blink.kernels.operands import UNSCALED, HeadNorm
from blink.kernels.quantized import Format, PackedWeight
from blink.kernels.weight import Weight

_ROWS = 8  # of weights, that a block copies and multiplies together
_ROW_BYTES = 2048  # of a stage
_STAGE_BYTES, _GROUP_BYTES = _ROWS * (_ROW_BYTES + 64) + 32, _ROWS * (_ROW_BYTES // 16 + 16)
_SHARED_BYTES = 227 << 10
_SUM_BYTES = 32 * 8 * _ROWS * 4
_THREADS = 384
_COPY_WARPS = 4  # each fills the same slots of the ring
_HANDOVER_WORDS = 2  # of words.cuh's Handovers
_ATTEND_WARPS = 4
_MOST_PARTS = 16  # which a thread adds up
_MIN_SLOTS = 4


class _Matrix(ctypes.Structure):  # row_step_shape.cuh's Matrix
    _fields_ = [("values", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("groups", ctypes.c_void_p)]


class _Layer(ctypes.Structure):  # row_step_shape.cuh's LayerArgs
    _fields_ = [
        ("attention", AttentionArguments),
        ("qkv", _Matrix),
        ("output", _Matrix),
        ("gate_up", _Matrix),
        ("down", _Matrix),
        ("router", _Matrix),
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("qkv_bias", ctypes.c_void_p),
        ("padding", ctypes.c_char * 48),
    ]


class _Arguments(ctypes.Structure):  # row_step_shape.cuh's RowStepArgs
    _fields_ = [
        ("layers", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("lm_head", _Matrix),
        ("logits", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        ("handovers", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("num_layers", ctypes.c_int),
        ("vocab", ctypes.c_int),
        ("renormalize", ctypes.c_int),
    ]


class Form(Enum):
    """How weights lie: row_step_shape.cuh's Form."""

    BF16 = "blink::Form::kBf16"
    FP8_ROWS = "blink::Form::kFp8Rows"
    FP8 = "blink::Form::kFp8"
    INT4 = "blink::Form::kInt4"

    @property
    def chunk_k(self) -> int:
        """Of how many k a product's are a multiple."""
        return {Form.BF16: 32, Form.FP8_ROWS: 64, Form.FP8: 128}.get(self, 512)

    @property
    def stage_k(self) -> int:
        """Columns of a row of weights in a stage."""
        return _ROW_BYTES * {Form.BF16: 1, Form.INT4: 4}.get(self, 2) // 2


def find_form(weight: Weight | ExpertWeights) -> Form | None:
    """Return how a weight lies that the kernel can read; None of others."""
    if isinstance(weight, Tensor):
        return Form.BF16 if weight.dtype == torch.bfloat16 else None
    if isinstance(weight, Fp8Experts):
        return Form.FP8_ROWS
    if isinstance(weight, PackedWeight) and weight.format is Format.INT4:
        return Form.INT4
    return Form.FP8 if isinstance(weight, PackedWeight) and weight.groups is None else None


def _describe(weight: Weight | ExpertWeights | None) -> _Matrix:
    if isinstance(weight, PackedWeight | Fp8Experts):
        groups = weight.groups if isinstance(weight, PackedWeight) else None
        return _Matrix(weight.values.data_ptr(), address(weight.scales), address(groups))
    assert weight is None or (isinstance(weight, Tensor) and weight.is_contiguous())
    return _Matrix(address(weight))


@dataclass(frozen=True, slots=True)
class RowLayer:
    """A layer's weights: of experts those of blink.kernels.moe, with their router."""

    qkv: Weight
    output: Weight
    gate_up: Weight | ExpertWeights  # gates first
    down: Weight | ExpertWeights
    router: Tensor | None
    attention_norm: Tensor
    mlp_norm: Tensor
    qkv_bias: Tensor | None
    head_norm: HeadNorm | None


@dataclass(frozen=True, slots=True)
class RowShape:
    """What the kernel is made for."""

    form: Form
    mlp_form: Form  # of experts
    head_form: Form
    hidden: int
    width: int  # of the MLP, or of an expert
    num_experts: int
    top_k: int
    num_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    block_size: int
    head_norm: bool

    @property
    def mlp(self) -> int:
        """Width of what leads back to the residual: of all chosen experts."""
        return self.width * max(self.top_k, 1)

    @property
    def attended(self) -> int:
        """Width of what attention returns."""
        return self.num_heads * self.head_dim

    @property
    def qkv(self) -> int:
        """Width of the QKV product."""
        return self.attended + 2 * self.kv_heads * self.head_dim

    @property
    def blocks(self) -> int:
        """Blocks of the kernel; each has a part of every product. One multiprocessor belongs to the scheduler."""
        processors = torch.cuda.get_device_properties().multi_processor_count - 1
        return min(processors, self.hidden // _ROWS, self.qkv // _ROWS, self.mlp // 4)

    @property
    def parts(self) -> int:
        """Blocks that share a KV head's keys."""
        outputs, most = self.attended // self.kv_heads, min(_MOST_PARTS, self.blocks // self.kv_heads)
        return next(parts for parts in range(most, 0, -1) if outputs % (4 * parts) == 0)

    @property
    def slots(self) -> int:
        """Stages of a block's ring."""
        slots = (_SHARED_BYTES - self.count_bytes(0)) // (self.count_bytes(1) - self.count_bytes(0))
        return slots // _COPY_WARPS * _COPY_WARPS

    def count_bytes(self, slots: int) -> int:
        """Return the size of row_step_shape.cuh's RowStepShared with so many stages, at most."""
        most_k = max(self.hidden, self.mlp, self.attended)
        groups = _GROUP_BYTES if Form.INT4 in (self.form, self.head_form) else 0
        other = self._attention_bytes() + most_k * 2 + most_k // 16 + _SUM_BYTES + 2048
        return other + slots * (_STAGE_BYTES + groups + 16)

    @property
    def words(self) -> int:
        """Words that are handed over."""
        group = self.num_heads // self.kv_heads
        plain = (self.qkv + self.attended + 2 * self.hidden + self.mlp + self.num_experts) // 2
        return plain + self.kv_heads * self.parts * (self.attended // self.kv_heads + 2 * group)

    def _attention_bytes(self) -> int:
        group = self.num_heads // self.kv_heads
        tiles = _ATTEND_WARPS * TILE_KEYS * self.head_dim * 4
        heads = group * (self.head_dim + 32) * 2 + 4 * self.head_dim + group * self.head_dim * 4
        return tiles + heads + (8 * group + 4) * (_ATTEND_WARPS + self.parts) + 8 * _ATTEND_WARPS + 120

    def fits(self, dtype: torch.dtype) -> bool:
        """Tell whether there is such a kernel; needs a current GPU."""
        if not can_multiply_groups() or self.blocks < self.kv_heads or not self._can_choose():
            return False
        heads = (self.head_dim, self.rotary_dim, self.num_heads, self.kv_heads, self.block_size, dtype)
        inputs = [(self.hidden, self.form), (self.attended, self.form), (self.hidden, self.mlp_form)]
        inputs += [(self.width, self.mlp_form), (self.hidden, self.head_form)]
        return can_attend(*heads) and all(k % form.chunk_k == 0 for k, form in inputs) and self.slots >= _MIN_SLOTS

    def _can_choose(self) -> bool:
        """Tell whether a lane has pairs of experts, and a stage a row of an expert's way back."""
        return not self.num_experts or (self.num_experts % 64 == 0 and self.width <= self.mlp_form.stage_k)

    def kernel(self) -> str:
        """Return the kernel's name."""
        sizes = (self.hidden, self.width, self.num_experts, self.top_k, self.num_heads // self.kv_heads, self.kv_heads)
        others = (self.head_dim, self.rotary_dim, self.block_size, self.parts, self.slots, str(self.head_norm).lower())
        forms = (form.value for form in (self.form, self.mlp_form, self.head_form))
        return f"blink::row_step<{', '.join(map(str, (*forms, *sizes, *others)))}>"


@dataclass(frozen=True, slots=True)
class RowModel:
    """A model whose steps of one row the kernel computes."""

    shape: RowShape
    layers: Sequence[RowLayer]
    norm: Tensor
    lm_head: Weight
    rotary_table: Tensor
    eps: float
    renormalize: bool


class RowStep:
    """A step's kernel, with what it hands over between blocks."""

    def __init__(self, model: RowModel, batch: Batch, kv_cache: Tensor) -> None:
        """kv_cache: [layers, 2, blocks, block_size, kv_heads, head_dim]; what is given must stay where it is."""
        self._model, self._kept = model, (batch, kv_cache)
        table = (_Layer * len(model.layers))()
        qkv = model.norm.new_empty(1, model.shape.qkv)
        for entry, layer, cache in zip(table, model.layers, kv_cache, strict=True):
            heads = (layer.head_norm, UNSCALED)
            entry.attention = make_arguments(qkv, cache, batch, model.rotary_table, heads, qkv)
            for name in ("qkv", "output", "gate_up", "down", "router"):
                setattr(entry, name, _describe(getattr(layer, name)))
            for name in ("attention_norm", "mlp_norm", "qkv_bias"):
                setattr(entry, name, address(getattr(layer, name)))
        self._layers = torch.frombuffer(bytearray(table), dtype=torch.uint8).to(model.norm.device)
        self._words = torch.zeros(model.shape.words, dtype=torch.int64, device=model.norm.device)
        self._handovers = torch.zeros(_HANDOVER_WORDS, dtype=torch.int32, device=model.norm.device)

    def run(self, residual: Tensor) -> Tensor:
        """Return the logits [1, vocab] of the embedding [1, hidden] of the batch's row."""
        model, vocab = self._model, self._model.lm_head.shape[0]
        assert residual.shape == (1, model.shape.hidden) and residual.is_contiguous() and vocab % _ROWS == 0
        logits = residual.new_empty(1, vocab)
        arguments = _Arguments(
            self._layers.data_ptr(),
            residual.data_ptr(),
            model.norm.data_ptr(),
            _describe(model.lm_head),
            logits.data_ptr(),
            self._words.data_ptr(),
            self._handovers.data_ptr(),
            model.eps,
            len(model.layers),
            vocab,
            model.renormalize,
        )
        kernel = compile_kernel(model.shape.kernel())
        launch(kernel, (model.shape.blocks, 1), _THREADS, arguments, shared_bytes=_SHARED_BYTES)
        return logits
