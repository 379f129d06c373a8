# SPDX-License-Identifier: Apache-2.0
"""Steps whose norms are kernels of their own: of any number of tokens, on every device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.nn.functional as functional
from torch import Tensor

from blink.formats.base import Weight, plain
from blink.kernels.activation import activate
from blink.kernels.norm import LAYER_NORMS, RMS_NORMS
from blink.kernels.operands import Norm
from blink.kernels.rms_norm import add_norm, rms_norm
from blink.kernels.router import choose_experts
from blink.models.layer_weights import DenseWeights, LayerEnd, MlpBeside, MoeWeights
from blink.plan.execution_plan import Choice, LayerPlan
from blink.runner.matmul import linear
from blink.runner.step import Step, cap_logits, take_last_tokens
from blink.runner.stream import Stream, Then


@dataclass(frozen=True, slots=True)
class _Pending:
    """What is yet to be added to the residual."""

    update: Tensor
    end_norm: Tensor | None = None  # of the update
    scale: Tensor | None = None  # that the residual is then multiplied by
    is_partial: bool = False  # all ranks' updates are to be added up


class NormKernels(Stream):
    """What an operation computed is added to the residual by the norm behind it."""

    def __init__(self, step: Step, residual: Tensor) -> None:
        """Begin with a residual [tokens, hidden]."""
        self.residual = residual
        self._step, self._eps = step, step.model.spec.rms_norm_eps
        self._norms = LAYER_NORMS if step.model.spec.layers[0].norm_biases else RMS_NORMS
        self._pending: _Pending | None = None
        self._projected: Tensor | None = None  # what project() has multiplied last

    def read(self, norm: Norm | None) -> Tensor:
        """Return the norm of the residual [tokens, hidden], or the residual itself."""
        pending, self._pending = self._pending, None
        if pending is None:
            return self.residual if norm is None else self._norms.whole(self.residual, norm, self._eps)
        if pending.is_partial:
            fused = self._step.ranks.add_norm
            is_plain = self._norms is RMS_NORMS and pending.end_norm is None and pending.scale is None
            if fused is not None and norm is not None and is_plain:
                return fused(pending.update, self.residual, plain(norm), self._eps)
            pending = self._complete(pending)
        if norm is not None and pending.end_norm is not None:
            return add_norm(pending.update, pending.end_norm, self.residual, plain(norm), self._eps, pending.scale)
        if norm is not None and pending.scale is None:
            return self._norms.whole(pending.update, norm, self._eps, self.residual)
        self.residual.add_(self._normalize(pending))
        if pending.scale is not None:
            self.residual.mul_(pending.scale)
        return self.residual if norm is None else self._norms.whole(self.residual, norm, self._eps)

    def put(self, update: Tensor) -> None:
        """Add an update to the residual."""
        assert self._pending is None
        self._pending = _Pending(update)

    def look(self) -> Tensor:
        """Return the residual with all that was added, of which nothing changes."""
        if self._pending is None:
            return self.residual
        pending = self._complete(self._pending)
        total = self.residual + self._normalize(pending)
        return total if pending.scale is None else total.mul_(pending.scale)

    def _complete(self, pending: _Pending) -> _Pending:
        """Return what all ranks add together."""
        return replace(pending, update=self._sum(pending.update), is_partial=False) if pending.is_partial else pending

    def _normalize(self, pending: _Pending) -> Tensor:
        """Return what is to be added."""
        update, norm = pending.update, pending.end_norm
        return update if norm is None else rms_norm(update, norm, self._eps)

    def project(self, norm: Norm | None, weight: Weight, bias: Tensor | None, choice: Choice) -> Tensor:
        """Return the norm of the residual times a weight."""
        self._projected = self.read(norm)
        return self._multiply(self._projected, weight, bias, choice)

    def project_again(self, weight: Weight, choice: Choice | None) -> Tensor:
        """Return what project() multiplied last times another weight."""
        assert choice is not None and self._projected is not None
        projected, self._projected = self._projected, None
        return self._multiply(projected, weight, None, choice)

    def add(self, x: Tensor, weight: Weight, bias: Tensor | None, choice: Choice, then: Then) -> None:
        """Add x times a weight to the residual."""
        self._write(self._multiply(x, weight, bias, choice), then, is_partial=True)

    def add_dense(self, mlp: DenseWeights, norm: Norm | None, plan: LayerPlan, then: Then) -> None:
        """Add a gated MLP of the norm of the residual."""
        self._write(self._run_dense(self.read(norm), mlp, plan), then, is_partial=True)

    def add_experts(self, mlp: MoeWeights, norm: Norm | None, plan: LayerPlan, then: Then) -> None:
        """Add a mixture of experts of the norm of the residual."""
        hidden = self.read(norm)
        if mlp.beside is not None:
            self._write(self._run_beside(hidden, mlp, mlp.beside, plan), then)
            return
        self._write(self._run_experts(hidden, mlp, plan), then, is_partial=True)

    def _run_experts(self, hidden: Tensor, mlp: MoeWeights, plan: LayerPlan) -> Tensor:
        """Return the mixture of experts of rows, with what the expert of all tokens makes of them."""
        found, shared = self._mix(hidden, hidden, mlp, plan), mlp.shared
        if shared is None:
            return found
        same = self._run_dense(hidden, shared.mlp, plan)
        return self._step.kernels.experts.add_shared(found, same, hidden, shared.gate)

    def _run_beside(self, hidden: Tensor, mlp: MoeWeights, beside: MlpBeside, plan: LayerPlan) -> Tensor:
        """Return an MLP of the norm of the residual, and experts of other norms of it."""
        dense = rms_norm(self._sum(self._run_dense(hidden, beside.mlp, plan)), beside.end_norm, self._eps)
        routed = rms_norm(self.residual, beside.router_norm, self._eps)
        found = self._sum(self._mix(rms_norm(self.residual, beside.experts_norm, self._eps), routed, mlp, plan))
        return dense.add_(rms_norm(found, beside.experts_end_norm, self._eps))

    def _mix(self, hidden: Tensor, routed: Tensor, mlp: MoeWeights, plan: LayerPlan) -> Tensor:
        """Return the mixture of experts of rows; routed: what the router reads."""
        assert plan.router is not None and plan.experts is not None
        kernels, router = self._step.kernels.experts, mlp.spec.router
        mix, num_tokens = kernels.mixtures[plan.experts.kernel], self._step.num_tokens
        updates = self._step.updates
        if not router.is_plain and mlp.router_bias is None and updates is None:
            chosen = kernels.choose_of_rows(routed, mlp.router, router, mlp.choice_bias)
            if chosen is not None:
                return mix(hidden, chosen.ranks, mlp, num_tokens, chosen.weights, None)
        logits, weights = self._multiply(routed.to(mlp.router.dtype), mlp.router, mlp.router_bias, plan.router), None
        if mlp.spec.scales_inputs:  # the one expert of a token then has the weight 1
            hidden = hidden * logits.amax(-1, keepdim=True).sigmoid()
        if not router.is_plain:
            logits, weights = choose_experts(kernels.choose, logits, router, mlp.choice_bias, hidden.dtype)
        return mix(hidden, logits, mlp, num_tokens, weights, updates)

    def end_layer(self, end: LayerEnd, inputs: Tensor | None) -> None:
        """Add what a layer makes of its own input, and scale the residual."""
        if end.inputs is not None:
            assert inputs is not None
            gated = functional.gelu(linear(self.read(None), end.inputs.gate), approximate="tanh").mul_(inputs)
            self._pending = _Pending(linear(gated, end.inputs.projection), end.inputs.norm)
        assert self._pending is not None
        self._pending = replace(self._pending, scale=end.scale)

    def compute_logits(self, weight: Weight, choice: Choice) -> Tensor:
        """Return the logits [rows, vocab] of each row's last token."""
        model, rows = self._step.model, self._step.bucket.rows
        batch = self._step.batch
        if self._pending is not None and self._pending.scale is not None:
            self.read(None)
        if self._pending is None:
            hidden = self._norms.whole(take_last_tokens(self.residual, batch, rows), model.norm, self._eps)
        else:
            starts, update = batch.query_starts, self._normalize(self._complete(self._pending))
            hidden = self._norms.last_tokens(update, model.norm, self._eps, self.residual, starts, rows)
        return cap_logits(model.spec, self._step.ranks.join(self._multiply(hidden, weight, None, choice)))

    def pause(self) -> None:
        """Leave all in the residual."""
        self.read(None)

    def _run_dense(self, hidden: Tensor, mlp: DenseWeights, plan: LayerPlan) -> Tensor:
        """Return a gated MLP of rows."""
        assert plan.gate_up is not None and plan.down is not None
        gated = self._step.kernels.gated.get(plan.gate_up.kernel)
        if gated is not None:
            inner = gated.multiply(hidden, mlp.gate_up)
        else:
            inner = activate(self._multiply(hidden, mlp.gate_up, mlp.biases[0], plan.gate_up), mlp.activation)
        return self._multiply(inner, mlp.down, mlp.biases[1], plan.down)

    def _write(self, update: Tensor, then: Then, *, is_partial: bool = False) -> None:
        end_norm = None if then.end_norm is None else plain(then.end_norm)
        pending = _Pending(update, end_norm, is_partial=is_partial and self._step.ranks.size > 1)
        if then.scale != 1:
            pending = _Pending(self._normalize(self._complete(pending)).mul_(then.scale))
        self._pending = pending

    def _sum(self, partial: Tensor) -> Tensor:
        """Return what all ranks have computed together (Epilogue.PARTIAL)."""
        return self._step.ranks.add(partial)

    def _multiply(self, x: Tensor, weight: Weight, bias: Tensor | None, choice: Choice) -> Tensor:
        found, updates = self._step.kernels.matmuls[choice.kernel].multiply(x, weight, bias), self._step.updates
        return found if updates is None else updates.add(found, x, weight)
