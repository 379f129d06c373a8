# SPDX-License-Identifier: Apache-2.0
"""`blink quantize`: read a model, round its matrices for a text, write it again."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from blink.errors import ConfigError
from blink.formats.matrix import QuantizedMatrix
from blink.models.spec import ModelSpec
from blink.models.weights.decoder_loader import DecoderLoader
from blink.models.weights.quantized_checkpoint import OUTPUT
from blink.models.weights.target import WeightTarget
from blink.models.weights.text_files import read_named_text
from blink.quantize.calibration import CalibratedCheckpoint, feed, takes_rounding
from blink.quantize.config import GROUP_SIZES, QuantizeConfig
from blink.quantize.differentiable import EMBEDDING, check_differentiable
from blink.quantize.directory import ModelDirectory, describe_quantization
from blink.quantize.own_text import write_texts
from blink.quantize.rounding import Fp8Grid, Grid, Int4Grid, round_matrix
from blink.quantize.source import SourceModel
from blink.quantize.tuning import Recipe, Rounded, tune
from blink.text.tokenizer import Tokenizer

logger = logging.getLogger("blink.quantize")

_TEXT = Path(__file__).with_name("calibration.txt")
_MAX_TEXT_BYTES = 64 << 20
_WINDOW = 1024
_SHORTEST = 128  # tokens
_TEXT_LENGTH = 512  # tokens of a text to tune by
_MAX_TEXTS = 8192
_OUTPUT_ROWS = 8192  # of the output layer, rounded at once
_CPU = torch.device("cpu")


def quantize(model: str, output: str, config: QuantizeConfig) -> Path:
    """Quantize a model into a new directory and return that.

    Raises:
        ConfigError: the model, the text or the directory are not to be used; the message says why.
    """
    start = time.monotonic()
    source = SourceModel(model)
    length = min(_WINDOW, source.spec.max_model_len)
    spec = source.spec.limit(length)
    group = _choose_group(config, spec)
    tokenizer = source.load_assets().tokenizer
    windows = read_windows(tokenizer, config, length)
    if config.tune:
        check_differentiable(spec)
    source.check_weights()
    directory = ModelDirectory(Path(output).expanduser())
    rounded: dict[str, QuantizedMatrix] = {}
    take = rounded.__setitem__ if config.tune else directory.add_matrix
    checkpoint, hidden = _round_matrices(source, spec, config, partial(_choose_grid, config, group), take, windows)
    if config.quantize_lm_head:
        directory.add_matrix(OUTPUT, _round_output(checkpoint, EMBEDDING if spec.tie_embeddings else OUTPUT, hidden))
    others = {name: shape for name, shape in checkpoint.shapes.items() if not takes_rounding(name)}
    norms: dict[str, Tensor] = {}
    if config.tune:
        kept = {name: source.read(name, shape) for name, shape in others.items()}
        before = Rounded({name: checkpoint.read([name]) for name in rounded}, kept, rounded)
        recipe = Recipe(steps=config.tune)
        rounded, norms = tune(spec, before, _write_texts(source, recipe, begin_text(tokenizer), windows), recipe)
        for name, matrix in rounded.items():
            directory.add_matrix(name, matrix)
    if config.quantize_lm_head:
        others.pop(OUTPUT, None)
    for name, shape in others.items():
        directory.add(name, norms[name] if name in norms else source.read(name, shape))
    unrounded = [name for name, shape in others.items() if len(shape) == 2 and name not in (EMBEDDING, OUTPUT)]
    quantization = describe_quantization(config, group, [name.removesuffix(".weight") for name in unrounded])
    source.write_files(directory, quantization, has_own_output=config.quantize_lm_head)
    size = directory.finish()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    logger.info(
        "%s: %s, %.3f GB of weights, %d tokens of calibration, %.0f s, at most %.1f GB of memory",
        directory.path, config.format, size / 1e9, windows.numel(), time.monotonic() - start, peak / 1e9,
    )  # fmt: skip
    return directory.path


def _round_matrices(
    source: SourceModel,
    spec: ModelSpec,
    config: QuantizeConfig,
    choose_grid: Callable[[str], Grid],
    take: Callable[[str, QuantizedMatrix], None],
    windows: Tensor,
) -> tuple[CalibratedCheckpoint, Tensor]:
    """Round the model's matrices by what the text's windows make of them, and hand over each that is finished.

    Return what they were read from, and what the output layer would read of the text's tokens [tokens, hidden].
    """
    with tqdm(
        total=spec.num_matrix_weights, desc="rounding", unit=" weights", unit_scale=True, disable=None
    ) as progress:

        def keep(name: str, matrix: QuantizedMatrix) -> None:
            take(name, matrix)
            progress.update(matrix.values.numel())

        checkpoint = CalibratedCheckpoint(source.checkpoint, choose_grid, keep, windows)
        decoder = DecoderLoader(checkpoint, spec, WeightTarget(_CPU, torch.float32, lambda count: count)).load()
        _check_names(config, checkpoint.waiting)
        hidden = feed(decoder, windows)
        checkpoint.round_rest()
    return checkpoint, hidden


def _round_output(checkpoint: CalibratedCheckpoint, name: str, x: Tensor) -> QuantizedMatrix:
    """Round the output layer, a matrix of that name, for inputs [tokens, hidden], none of which counts for more."""
    hessian = x.T @ x
    parts = [round_matrix(part, hessian, Fp8Grid()) for part in checkpoint.read([name]).split(_OUTPUT_ROWS)]
    return QuantizedMatrix(torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts]))


def read_windows(tokenizer: Tokenizer, config: QuantizeConfig, length: int) -> Tensor:
    """Return the text's tokens in windows [number, tokens], each beginning as the model's texts do."""
    path = Path(config.calibration).expanduser() if config.calibration else _TEXT
    begin = begin_text(tokenizer)
    tokens = tokenizer.encode(read_named_text(path, _MAX_TEXT_BYTES), add_special_tokens=False)
    tokens = tokens[: config.num_calibration_tokens]
    if len(tokens) < _SHORTEST:
        raise ConfigError(f"--calibration {path} has {len(tokens)} tokens; give a text of {_SHORTEST} or more.")
    size = min(length - len(begin), len(tokens))
    return torch.tensor([begin + tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)])


def begin_text(tokenizer: Tokenizer) -> list[int]:
    """Return what the model's texts begin with: one token, or none."""
    return tokenizer.encode("", add_special_tokens=True)[:1]


def _write_texts(source: SourceModel, recipe: Recipe, begin: list[int], windows: Tensor) -> Tensor:
    """Return texts [number, tokens] by the model itself, a new one for each place of a step, up to a number."""
    count = min(recipe.steps * recipe.texts, _MAX_TEXTS)
    return write_texts(str(source.path), begin, windows, (count, min(_TEXT_LENGTH, source.spec.max_model_len)))


def _choose_grid(config: QuantizeConfig, group: int, name: str) -> Grid:
    """Return what a matrix is rounded to."""
    is_int4 = config.format == "int4" and not name.removesuffix(".weight").endswith(config.fp8_matrices)
    return Int4Grid(group) if is_int4 else Fp8Grid()


def _check_names(config: QuantizeConfig, names: Iterable[str]) -> None:
    ends = config.fp8_matrices
    stems = [name.removesuffix(".weight") for name in names]
    for end in ends:
        if not end or not any(stem.endswith(end) for stem in stems):
            raise ConfigError(f"--fp8-matrix {end} is the end of no matrix' name; give one such as {stems[0]}.")
    if config.tune and all(stem.endswith(ends) for stem in stems):
        raise ConfigError("--tune needs matrices of 4 bits, and --fp8-matrix names them all.")


def _choose_group(config: QuantizeConfig, spec: ModelSpec) -> int:
    """Return the columns of a group of 4 bits, all matrices having whole ones; 0 for FP8."""
    if config.format != "int4":
        if config.group_size:
            raise ConfigError("--group-size is for --format int4: FP8 has a scale for each row.")
        return 0
    layers = spec.distinct_layers
    widths = {spec.hidden_size, *(layer.mixer.out_size for layer in layers), *(layer.mlp.size for layer in layers)}
    widths |= {layer.mlp.mixture.shared_size for layer in layers if layer.mlp.mixture} - {0}
    sizes = [config.group_size] if config.group_size else GROUP_SIZES
    for size in sizes:
        if all(columns % size == 0 for columns in widths):
            return size
    raise ConfigError(
        f"Rows of {', '.join(map(str, sorted(widths)))} columns have no whole groups of {sizes[-1]}:"
        f" use --format fp8{' or another --group-size' if config.group_size else ''}."
    )
