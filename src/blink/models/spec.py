# SPDX-License-Identifier: Apache-2.0
"""ModelSpec: everything about a model that is not a weight. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from blink.errors import ConfigError
from blink.formats.schemes import Quantization
from blink.models.cache_layout import CacheLayout
from blink.models.layers import Attention, LayerSpec, shorten_window
from blink.models.mlps import MoeMlp
from blink.models.part import Part
from blink.models.pooling import Pooling
from blink.models.shard import WHOLE, Shard


@dataclass(frozen=True, slots=True)
class PositionTable:
    """Learned positions: a table whose row p + offset is added to the embedding of position p."""

    rows: int
    offset: int


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Per-layer embeddings: a table with a row of each token, of which every layer reads its own `size` columns."""

    rows: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(Part):
    """Describe a decoder."""

    architecture: str  # Hugging Face's model_type, one of families/
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]  # equal ones are mostly one object
    rms_norm_eps: float
    max_model_len: int
    tie_embeddings: bool = False
    embedding_scale: float = 1.0
    logits_softcap: float = 0.0  # logits become cap * tanh(logit / cap); 0: as they are
    logits_divisor: float = 1.0
    positions: PositionTable | None = None
    layer_inputs: LayerInputs | None = None
    embedding_size: int = 0  # of embeddings that are projected to hidden_size, and back for logits; 0: none are
    pooling: Pooling | None = None  # None: the model generates
    quantization: Quantization | None = None  # of the checkpoint's matrices
    drafter: Attention | None = None  # of a draft head's layer, which keeps keys and values as the others do
    spare_blocks: int = 0  # of that layer, for the guesses of a step: see PerToken
    rollback: int = 0  # tokens that may be taken back of a step: see PerSequence
    shard: Shard = WHOLE  # what the layers are parts of; the vocabulary's size is that of all
    whole: ModelSpec | None = field(default=None, compare=False, repr=False)  # of which a rank has this part

    def check(self, place: str) -> None:
        """Check what the values must be to each other; `place` names the file that they come from.

        Raises:
            ConfigError: the model cannot be as it is described.
        """
        for layer in self.distinct_layers:
            for rule, holds in layer.rules.items():
                if not holds:
                    raise ConfigError(f"{place}: {rule}; download or convert the model again.")
        if not self.attentions:
            raise ConfigError(f"{place}: no layer has attention, which is not supported; use another model.")

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def distinct_layers(self) -> tuple[LayerSpec, ...]:
        """The layers, each that equals an earlier one left out."""
        return tuple(dict.fromkeys(self._objects.values()))

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The attention of each of the distinct layers that have one."""
        return tuple(filter(None, (layer.mixer.attention for layer in self.distinct_layers)))

    @property
    def has_latents(self) -> bool:
        """Whether a layer attends to latents."""
        return any(one.latent is not None for one in self.attentions)

    @property
    def has_windows(self) -> bool:
        """Whether a layer attends to a window."""
        return any(one.window > 0 for one in self.attentions)

    @property
    def has_states(self) -> bool:
        """Whether a layer is recurrent."""
        return any(layer.mixer.recurrent_state is not None for layer in self.distinct_layers)

    @property
    def _objects(self) -> dict[int, LayerSpec]:
        """The layers that are different objects, by their ids: comparing them would compare all their fields."""
        return {id(layer): layer for layer in self.layers}

    @property
    def mixture(self) -> MoeMlp | None:
        """The first layer's mixture of experts that has one; None: no layer has."""
        return next(filter(None, (layer.mlp.mixture for layer in self.layers)), None)

    @property
    def cache_layout(self) -> CacheLayout:
        """What the layers keep of running sequences; the draft head's is the last one."""
        mixers = [layer.mixer for layer in self.layers]
        states = [mixer.state for mixer in mixers]
        if self.drafter is not None and self.drafter.state is not None:
            states.append(replace(self.drafter.state, spare_blocks=self.spare_blocks))
        recurrent = [mixer.recurrent_state for mixer in mixers]
        return CacheLayout.of(states, [one and replace(one, rollback=self.rollback) for one in recurrent])

    @property
    def as_stored(self) -> ModelSpec:
        """The model as its files describe it, without what an engine lets it keep besides."""
        return replace(self, drafter=None, spare_blocks=0, rollback=0)

    def with_layers(self, change: Callable[[LayerSpec], LayerSpec]) -> ModelSpec:
        """Return the model with each layer changed."""
        changed = {one: change(layer) for one, layer in self._objects.items()}
        return replace(self, layers=tuple(changed[id(layer)] for layer in self.layers))

    def with_attention(self, change: Callable[[Attention], Attention]) -> ModelSpec:
        """Return the model with each layer's attention changed."""

        def change_one(layer: LayerSpec) -> LayerSpec:
            attention = layer.mixer.attention
            return layer if attention is None else replace(layer, mixer=change(attention))

        return self.with_layers(change_one)

    def limit(self, max_model_len: int) -> ModelSpec:
        """Return the model with a shorter context, or the same; this is to be done once."""

        def fit(attention: Attention) -> Attention:
            window, chunk = (shorten_window(one, max_model_len) for one in (attention.window, attention.chunk))
            return replace(attention, window=window, chunk=chunk, rope=attention.rope.fit(max_model_len))

        return replace(self.with_attention(fit), max_model_len=max_model_len)

    @property
    def scaled_columns(self) -> int:
        """How many columns of a row share a scale, so that ranks cannot part them."""
        scheme = self.quantization
        return 1 if scheme is None or not scheme.has_groups else scheme.group

    def split(self, size: int, block: int = 1) -> tuple[ModelSpec, ...]:
        """Return what each of so many ranks has; block: columns of a row that cannot be parted, for they share a scale.

        Raises:
            ConfigError: the size does not divide the model.
        """
        if self.pooling is not None and self.pooling.score_tokens is not None:
            raise ConfigError(
                f"--tensor-parallel-size {size}: rerankers that score by tokens run on one rank: leave it out"
            )
        broken = self._find_broken(size, block)
        if broken:
            fitting = [str(one) for one in range(1, 65) if not self._find_broken(one, block)]
            raise ConfigError(
                f"--tensor-parallel-size {size} does not divide the model's {' or '.join(broken)}; "
                f"sizes that fit: {', '.join(fitting)}"
            )
        layers = self.with_layers(lambda layer: layer.split(size, block))
        return tuple(replace(layers, shard=Shard(rank, size), whole=self) for rank in range(size))

    def _find_broken(self, size: int, block: int) -> list[str]:
        if size == 1:
            return []
        mixer_block = 1 if self.quantization is not None and self.quantization.experts_only else block
        rules = [layer.split_rules(size, block, mixer_block) for layer in self.distinct_layers]
        return list(dict.fromkeys(rule for each in rules for rule, holds in each.items() if not holds))

    @property
    def vocab_part(self) -> range:
        """The tokens whose rows of embedding and output layer the rank has."""
        return self.shard.take_rows(self.vocab_size)

    def count(self, measure: Callable[[LayerSpec], int]) -> int:
        """Return the sum of a number over all layers."""
        times = Counter(map(id, self.layers))
        return sum(measure(layer) * times[one] for one, layer in self._objects.items())

    @property
    def num_matrix_weights(self) -> int:
        """Number of weights in the layers' matrices, but for routers: those that are quantized."""
        mlps = self.count(lambda layer: layer.mlp.num_matrix_weights(self.hidden_size))
        if self.quantization is not None and self.quantization.experts_only:
            return mlps
        return mlps + self.count(lambda layer: layer.mixer.num_matrix_weights(self.hidden_size))

    @property
    def num_expert_weights(self) -> int:
        """Number of weights in the experts' matrices."""
        return self.count(lambda layer: layer.mlp.num_expert_weights(self.hidden_size))

    @property
    def num_output_weights(self) -> int:
        """Number of weights in the output layer, which may be the embedding."""
        return len(self.vocab_part) * self.hidden_size

    @property
    def output_quantization(self) -> Quantization | None:
        """How the output layer is quantized, by the config; None: it is not, as it never is where it is tied."""
        return None if self.tie_embeddings or self.quantization is None else self.quantization.output

    @property
    def num_parameters(self) -> int:
        """Number of weights, those of a tied embedding counted once."""
        width = self.embedding_size or self.hidden_size
        embeddings = len(self.vocab_part) * width * (1 if self.tie_embeddings else 2)
        projections = 2 * self.hidden_size * self.embedding_size
        table = 0 if self.positions is None else self.positions.rows * self.hidden_size
        norm = 0 if self.layers[-1].norms == "replacing" else self.layers[-1].norm_size(self.hidden_size)
        layers = self.count(lambda layer: layer.num_parameters(self.hidden_size))
        return layers + embeddings + projections + table + norm + self._num_input_weights

    @property
    def num_table_weights(self) -> int:
        """Number of weights in the table of per-layer embeddings, of which a step reads a row for each token."""
        return 0 if self.layer_inputs is None else self.layer_inputs.rows * self.num_layers * self.layer_inputs.size

    @property
    def _num_input_weights(self) -> int:
        """Number of weights of per-layer embeddings, but for the layers' own."""
        if self.layer_inputs is None:
            return 0
        return self.num_table_weights + (self.hidden_size * self.num_layers + 1) * self.layer_inputs.size
