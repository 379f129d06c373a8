# SPDX-License-Identifier: Apache-2.0
"""Steps of few rows on a GPU: five kernels a layer, six with experts, of which each overlaps its neighbours. A
recurrent layer and an expert that all tokens have take some more.

With 1 or 2 rows each GEMV computes the norm of its input. With more, the kernel that writes the residual also writes
it times the next norm's weight, and the sum of squares. Experts of many rows take two kernels more. Short steps with
prompts take the same GEMMs, for which a row is a token, and another attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blink.formats.base import Weight, plain
from blink.kernels.batch import Batch
from blink.kernels.gpu.gemm import decode as gemm
from blink.kernels.gpu.gemm import gemv
from blink.kernels.gpu.gemm.gemm_kernel import GemmUpdate
from blink.kernels.gpu.moe import decode as moe
from blink.kernels.gpu.moe.decode_grouped import Mixture, add_grouped_experts
from blink.kernels.gpu.moe.shared_gate import scale_by_gate
from blink.kernels.operands import Norm
from blink.kernels.rms_norm import rms_norm
from blink.models.layer_weights import DenseWeights, MoeWeights, SharedExpert
from blink.plan.execution_plan import Choice, LayerPlan
from blink.runner.gpu_device import PERMUTED, STREAMED
from blink.runner.step import Step, take_last_tokens
from blink.runner.stream import Stream, Then


class ReaderNorms(Stream):
    """Each GEMV computes the norm of its input, and adds to the residual in place."""

    def __init__(self, step: Step) -> None:
        """Begin with the embeddings of a batch whose row r is its token r."""
        self._step, self._eps = step, step.model.spec.rms_norm_eps
        self._norm: Tensor | None = None  # of the last projection
        self.residual = plain(step.model.embedding).index_select(0, step.batch.input_ids[: step.bucket.rows])

    def project(self, norm: Norm | None, weight: Weight, bias: Tensor | None, choice: Choice) -> Tensor:  # noqa: ARG002
        """Return the norm of the residual times a weight."""
        self._norm = plain(norm)
        return gemv.normed_linear(self.residual, self._norm, self._eps, weight, bias)

    def project_again(self, weight: Weight, choice: Choice | None) -> Tensor:  # noqa: ARG002
        """Return the norm that project() took, times another weight."""
        assert self._norm is not None
        return gemv.normed_linear(self.residual, self._norm, self._eps, weight)

    def add(self, x: Tensor, weight: Weight, bias: Tensor | None, choice: Choice, then: Then) -> None:  # noqa: ARG002
        """Add x times a weight to the residual."""
        gemv.add_linear(x, weight, self.residual, bias)

    def add_dense(self, mlp: DenseWeights, norm: Norm | None, plan: LayerPlan, then: Then) -> None:  # noqa: ARG002
        """Add a gated MLP of the norm of the residual."""
        gated = gemv.gated_linear(self.residual, plain(norm), self._eps, mlp.gate_up)
        gemv.add_linear(gated, mlp.down, self.residual)

    def add_experts(self, mlp: MoeWeights, norm: Norm | None, plan: LayerPlan, then: Then) -> None:  # noqa: ARG002
        """Add a mixture of experts of the norm of the residual."""
        x, weight = self.residual, plain(norm)
        routes = _choose_experts(mlp, gemv.normed_linear(x, weight, self._eps, mlp.router), self._step.batch)
        shared = None if mlp.shared is None else self._gate_shared(mlp.shared, weight)
        gated = moe.gate_experts(x, weight, self._eps, mlp.gate_up, routes)
        if mlp.shared is not None and shared is not None:  # behind the last kernel that reads the residual's norm
            gemv.add_linear(shared, mlp.shared.mlp.down, x)
        moe.down_experts(gated, mlp.down, routes, x)

    def _gate_shared(self, shared: SharedExpert, norm: Tensor) -> Tensor:
        assert shared.gate is not None
        inner = gemv.gated_linear(self.residual, norm, self._eps, shared.mlp.gate_up)
        scale_by_gate(inner, self.residual, norm, self._eps, shared.gate)
        return inner

    def compute_logits(self, weight: Weight, choice: Choice) -> Tensor:  # noqa: ARG002
        """Return the logits [rows, vocab]."""
        return gemv.normed_linear(self.residual, plain(self._step.model.norm), self._eps, weight)

    def pause(self) -> Stream:
        """Keep the residual."""
        return self


class WriterNorms(Stream):
    """Who writes the residual prepares the norm of it for its reader."""

    ordered = False  # whether GEMMs add in one order for all steps

    def __init__(self, step: Step) -> None:
        """Begin with the embeddings of a batch's tokens."""
        model, plan = step.model, step.plan
        self._step, self._eps = step, model.spec.rms_norm_eps
        self.residual, self._normed = gemm.embed(
            step.batch.input_ids[: step.bucket.tokens],
            plain(model.embedding),
            plain(model.layers[0].attention_norm),
            hi_lo=plan.layers[0].qkv.reads,
            tokens=plan.padded,
            early=step.updates is None,  # what updates read early is written before
        )

    def project(self, norm: Norm | None, weight: Weight, bias: Tensor | None, choice: Choice) -> Tensor:  # noqa: ARG002
        """Return the norm of the residual times a weight."""
        update = self._begin_update(self._normed.x, weight)
        return gemm.normed_linear(self._normed, self._eps, weight, bias, ordered=self.ordered, update=update)

    def add(self, x: Tensor, weight: Weight, bias: Tensor | None, choice: Choice, then: Then) -> None:  # noqa: ARG002
        """Add x times a weight to the residual."""
        self._normed = gemm.add_linear(
            x,
            weight,
            self.residual,
            plain(then.next_norm),
            bias,
            hi_lo=then.next_reads,
            tokens=self._step.plan.padded,
            ordered=self.ordered,
            update=self._begin_update(x, weight),
        )

    def add_dense(self, mlp: DenseWeights, norm: Norm | None, plan: LayerPlan, then: Then) -> None:  # noqa: ARG002
        """Add a gated MLP of the norm of the residual."""
        assert plan.down is not None
        gated = gemm.gated_linear(
            self._normed,
            self._eps,
            mlp.gate_up,
            hi_lo=plan.down.reads,
            ordered=self.ordered,
            update=self._begin_update(self._normed.x, mlp.gate_up),
        )
        self.add(gated, mlp.down, None, plan.down, then)

    def add_experts(self, mlp: MoeWeights, norm: Norm | None, plan: LayerPlan, then: Then) -> None:
        """Add a mixture of experts of the norm of the residual."""
        assert plan.experts is not None
        if plan.experts.kernel == STREAMED:
            self._stream_experts(mlp, plain(norm), then)
        else:
            self._group_experts(mlp, then, permuted=plan.experts.kernel == PERMUTED)

    def _stream_experts(self, mlp: MoeWeights, norm: Tensor, then: Then) -> None:
        routes = _choose_experts(mlp, gemm.normed_linear(self._normed, self._eps, mlp.router), self._step.batch)
        gated = moe.gate_experts(self.residual, norm, self._eps, mlp.gate_up, routes)
        self._normed = moe.down_normed_experts(
            gated, mlp.down, routes, self.residual, plain(then.next_norm), hi_lo=then.next_reads
        )

    def _group_experts(self, mlp: MoeWeights, then: Then, *, permuted: bool) -> None:
        inverse_rms = self.residual.new_empty(len(self.residual), dtype=torch.float32)
        logits = gemm.normed_linear(self._normed, self._eps, mlp.router, inverse_rms=inverse_rms)
        self._normed = add_grouped_experts(
            self.residual,
            self._normed.x,
            inverse_rms,
            logits,
            Mixture(mlp.gate_up, mlp.down, mlp.spec.router.top_k, mlp.spec.router.renormalize),
            self._step.num_tokens,
            plain(then.next_norm),
            permuted=permuted,
            hi_lo=then.next_reads,
        )

    def compute_logits(self, weight: Weight, choice: Choice) -> Tensor:
        """Return the logits [rows, vocab] of each row's last token."""
        step = self._step
        if step.bucket.decoding:
            return gemm.normed_linear(self._normed, self._eps, weight)
        last = take_last_tokens(self.residual, step.batch, step.bucket.rows)
        return step.kernels.matmuls[choice.kernel].multiply(
            rms_norm(last, plain(step.model.norm), self._eps), weight, None
        )

    def _begin_update(self, x: Tensor, weight: Weight) -> GemmUpdate | None:  # noqa: ARG002
        """Return what the GEMM of x and a weight, launched next, adds to its sums; None: nothing."""
        return None

    def pause(self) -> Stream:
        """Keep the residual and its norm."""
        return self


def _choose_experts(mlp: MoeWeights, logits: Tensor, batch: Batch) -> moe.Routes:
    router = mlp.spec.router
    return moe.Routes(logits, batch.context_lens, router.top_k, router.renormalize)
