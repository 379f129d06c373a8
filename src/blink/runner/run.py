# SPDX-License-Identifier: Apache-2.0
"""Runner: runs a model's steps by their plans, one loop for all of them."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from blink.formats.base import take_rows
from blink.formats.schemes import FormatId
from blink.kernels.all_reduce import ONE_RANK, Ranks
from blink.kernels.batch import Batch, Header
from blink.kernels.layer_cache import KvCache
from blink.kernels.operands import Norm
from blink.kernels.pooling import Pooler
from blink.kernels.rounding import EXACT, begin_step
from blink.kernels.sampling import sample
from blink.kernels.scoring import score_prompts
from blink.models.decoder import Decoder
from blink.plan.execution_plan import NormStyle, StepPlan
from blink.plan.site import Bucket
from blink.runner.attend import Attend, make_attention
from blink.runner.devices import DeviceCode, code_of
from blink.runner.drafter import Drafter
from blink.runner.layer_inputs import compute_layer_inputs
from blink.runner.matmul import linear
from blink.runner.norm_kernels import NormKernels
from blink.runner.planner import plan_step
from blink.runner.sites import ModelSites, sites_of
from blink.runner.snapshots import load_snapshots, save_snapshots
from blink.runner.step import FindUpdates, Step, cap_logits, take_last_tokens
from blink.runner.stream import RunLayers, Stream, Then


class Runner:
    """Runs a model's steps. They write the KV cache and the batch's outputs and keep no other state."""

    def __init__(self, model: Decoder, ranks: Ranks = ONE_RANK, *, deterministic: bool = False) -> None:
        """Run a model, or one rank's part of it; only the first rank writes the batch's outputs.

        deterministic: a token has the same bits with any other tokens in its step, and in any chunk of its prompt.
        """
        self.model = model
        self._ranks = ranks
        self.find_updates: FindUpdates | None = None
        self.drafter: Drafter | None = None
        self.deterministic = deterministic
        self.rounding = EXACT  # what GEMMs on a CPU may round
        self._code: DeviceCode = code_of(model.device, deterministic=deterministic)
        # No cache of a method: it would be a circle, and keep the weights until the collector finds it.
        self._plans: dict[tuple[Bucket, int, bool], StepPlan] = {}
        self._sites: dict[int, ModelSites] = {}  # by the KV cache's block size
        pooling = model.spec.pooling
        self._pooler = None if pooling is None else Pooler(pooling.kind, model.classifier)

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        kv_cache: KvCache,
        size: Bucket,
        *,
        scoring: bool = False,
    ) -> None:
        """Run one step over the batch's first tokens and rows, as many as a size has, and sample.

        scoring: whether the logprobs of the prompts' own tokens are wanted beside the samples. A model that pools makes
        vectors instead.
        """
        if self._pooler is not None:
            hidden = self._compute_hidden(batch, kv_cache, size)
            if self._writes:
                self._pooler.pool(hidden, batch, size.rows)
            return
        if scoring:
            hidden = self._compute_hidden(batch, kv_cache, size)
            score_prompts(hidden, self._compute_head, batch, size.rows, writes=self._writes)
            self._sample(self._compute_head(take_last_tokens(hidden, batch, size.rows)), batch, size.rows)
        else:
            self._sample(self.compute_logits(batch, kv_cache, size), batch, size.rows)
        self.run_head(batch, kv_cache, size)

    @torch.inference_mode()
    def run_head(self, batch: Batch, kv_cache: KvCache, size: Bucket) -> None:
        """Let the draft head, if there is one, guess what follows the samples of a step."""
        if self.drafter is not None:
            self.drafter.read(batch, kv_cache[len(self.model.layers)], size)

    @torch.inference_mode()
    def compute_logits(self, batch: Batch, kv_cache: KvCache, size: Bucket) -> Tensor:
        """Run one step without sampling and return the logits [rows, vocab] of each row's last token."""
        step = self._make_step(batch, kv_cache, size)
        run = self._prepare(step, self._all_layers)
        stream = self._begin(step)
        run(stream)
        return stream.compute_logits(self.model.lm_head, step.plan.head)

    @torch.inference_mode()
    def forward_segment(
        self,
        batch: Batch,
        kv_cache: KvCache,
        size: Bucket,
        layers: range,
        residual: Tensor,
        before: Stream | None = None,
    ) -> Stream | None:
        """Run some of a step's layers: with the first of all it begins, with the last it samples.

        size: the step's; residual: [max_tokens, hidden], all that a step keeps between its segments beside the batch
        and the KV cache, unless the segment before returned something, `before`.
        """
        step = self._make_step(batch, kv_cache, size, whole=False)
        stream = before or self._resume(step, residual[: size.tokens], is_first=layers.start == 0)
        self._prepare(step, layers)(stream)
        if layers.stop < len(self.model.layers):
            return stream.pause()
        self._sample(stream.compute_logits(self.model.lm_head, step.plan.head), batch, size.rows)
        self.run_head(batch, kv_cache, size)
        return None

    @torch.inference_mode()
    def compute_hidden(self, batch: Batch, kv_cache: KvCache, num_tokens: int, num_rows: int) -> Tensor:
        """Return what the head reads of every token [num_tokens, hidden]."""
        return self._compute_hidden(batch, kv_cache, Bucket(num_tokens, num_rows, decoding=False))

    @torch.inference_mode()
    def run_mlp(self, batch: Batch, kv_cache: KvCache, residual: Tensor) -> Tensor:
        """Let the last layer's MLP add to a residual [rows, hidden] of rows of one token; return the norm of it."""
        size = Bucket(len(residual), len(residual), decoding=False)
        step, layer = self._make_step(batch, kv_cache, size, whole=False), self.model.layers[-1]
        stream, scale = NormKernels(step, residual), self.model.spec.layers[-1].residual_scale
        layer.mlp.add_to(stream, layer.mlp_norm, step.plan.layers[-1], Then(layer.mlp_end_norm, scale, None, None))
        return stream.read(self.model.norm)

    def _compute_hidden(self, batch: Batch, kv_cache: KvCache, size: Bucket) -> Tensor:
        step = self._make_step(batch, kv_cache, replace(size, decoding=False), whole=False)
        stream = self._begin(step)
        self._prepare(step, self._all_layers)(stream)
        return stream.read(self.model.norm)

    def _find_plan(self, bucket: Bucket, block_size: int, *, whole: bool) -> StepPlan:
        key = self._code.planned_size(bucket), block_size, whole
        if key not in self._plans:
            if block_size not in self._sites:
                self._sites[block_size] = sites_of(self.model, block_size)
            self._plans[key] = plan_step(self._code.device, self._sites[block_size], key[0], whole=whole)
        return self._plans[key]

    def _make_step(self, batch: Batch, kv_cache: KvCache, bucket: Bucket, *, whole: bool = True) -> Step:
        plan = self._find_plan(bucket, kv_cache.first.block_size, whole=whole)
        first_prompt = int(batch.header[Header.NUM_DECODE_ROWS]) if self.rounding.prompts else 0
        begin_step(self.rounding, bucket.tokens, first_prompt)
        updates = None if self.find_updates is None else self.find_updates(batch, bucket)
        rest = self._ranks, updates, self.deterministic
        return Step(self.model, self._code.kernels, plan, bucket, batch, kv_cache, *rest)

    def _begin(self, step: Step) -> Stream:
        """Begin with the embeddings. Snapshots are loaded before: see kernels/gpu/recurrent/decode.py."""
        load_snapshots(step, self._code.copy_states)
        if step.plan.norms is NormStyle.KERNEL:
            return NormKernels(step, self._embed(step.batch, step.bucket.tokens))
        return self._code.begin(step)

    def _resume(self, step: Step, residual: Tensor, *, is_first: bool) -> Stream:
        if step.plan.norms is not NormStyle.KERNEL:
            return self._begin(step)
        if is_first:
            load_snapshots(step, self._code.copy_states)
            self._embed(step.batch, step.bucket.tokens, residual)
        return NormKernels(step, residual)

    def _embed(self, batch: Batch, num_tokens: int, out: Tensor | None = None) -> Tensor:
        """Return what the layers begin with [tokens, hidden]; in `out` if that is given."""
        residual = self._look_up(batch.input_ids[:num_tokens], out)
        scale, table = self.model.spec.embedding_scale, self.model.positions
        if scale != 1:
            residual.mul_(scale)
        return residual if table is None else residual.add_(table.index_select(0, batch.positions[:num_tokens]))

    def _look_up(self, ids: Tensor, out: Tensor | None) -> Tensor:
        """Return the embeddings of tokens [tokens, hidden], of which each rank has some of the vocabulary's rows."""
        if self._ranks.size == 1:
            return take_rows(self.model.embedding, ids, out)
        part = self.model.spec.vocab_part
        is_elsewhere = (ids < part.start) | (ids >= part.stop)
        rows = take_rows(self.model.embedding, (ids - part.start).masked_fill_(is_elsewhere, 0))
        found = self._ranks.add(rows.masked_fill_(is_elsewhere[:, None], 0))
        return found if out is None else out.copy_(found)

    @property
    def _writes(self) -> bool:
        return self._ranks.rank == 0

    def _sample(self, logits: Tensor, batch: Batch, num_rows: int) -> None:
        if self._writes:
            sample(logits, batch, num_rows, deterministic=self.deterministic)

    @property
    def _all_layers(self) -> range:
        return range(len(self.model.layers))

    def _prepare(self, step: Step, layers: range) -> RunLayers:
        """Return what runs some layers: in one call, or one operation after the other."""
        whole = None if self.drafter is not None else self._code.find_layers(step, layers)
        if whole is not None:
            return whole
        return functools.partial(self._run_layers, step, layers, make_attention(step, layers, self._code))

    def _run_layers(self, step: Step, layers: range, attend: Attend, stream: Stream) -> None:
        """Add what some layers compute to the residual."""
        inputs = self._compute_inputs(step, layers)
        for index in layers:
            layer, plan = self.model.layers[index], step.plan.layers[index]
            scale = self.model.spec.layers[index].residual_scale
            qkv = stream.project(layer.attention_norm, layer.qkv, layer.qkv_bias, plan.qkv)
            if self.drafter is not None:
                self.drafter.keep(step.batch, index, stream.residual)
            gates = None if layer.recurrent is None else stream.project_again(layer.recurrent.gates, plan.gates)
            into_mlp = Then(layer.attention_end_norm, scale, layer.mlp_norm, plan.reads_mlp)
            stream.add(attend(qkv, gates, index), layer.output, layer.output_bias, plan.output, into_mlp)
            into_next = Then(layer.mlp_end_norm, scale, *self._find_next(step, index))
            layer.mlp.add_to(stream, layer.mlp_norm, plan, into_next)
            if layer.end is not None:
                stream.end_layer(layer.end, None if inputs is None else inputs[:, index - layers.start])
        if layers.stop == len(self.model.layers):
            save_snapshots(step, self._code.copy_states)
            if self.drafter is not None and self.drafter.reads_end:
                self.drafter.keep(step.batch, layers.stop, stream.look())

    def _compute_inputs(self, step: Step, layers: range) -> Tensor | None:
        """Return the inputs that some layers have of their own; None: they have none."""
        weights, tokens = self.model.inputs, step.bucket.tokens
        if weights is None:
            return None
        embeddings = self._embed(step.batch, tokens)
        ids, eps = step.batch.input_ids[:tokens], self.model.spec.rms_norm_eps
        return compute_layer_inputs(self._code.join_inputs, weights, ids, embeddings, layers, eps)

    def _find_next(self, step: Step, index: int) -> tuple[Norm | None, FormatId | None]:
        """Return the norm behind a layer, and what its reader reads."""
        if index + 1 == len(self.model.layers):
            return self.model.norm, step.plan.head.reads
        return self.model.layers[index + 1].attention_norm, step.plan.layers[index + 1].qkv.reads

    def _compute_head(self, hidden: Tensor) -> Tensor:
        return cap_logits(self.model.spec, self._ranks.join(linear(hidden, self.model.lm_head, code=self._code)))
