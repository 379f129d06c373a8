# SPDX-License-Identifier: Apache-2.0
"""What every step of some models launches on an H100, as text: recorded in tests/unit/launches, and compared there."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from blink.config import ModelConfig
from blink.engine.geometry import decode_graphs, mixed_graphs
from blink.kernels.batch import Batch
from blink.models.decoder import Decoder
from blink.models.weights.loader import load_model
from blink.plan.site import Bucket
from blink.runner.run import Runner
from launch_trace import fold, pretended_gpu
from quantized_checkpoints import SCHEMES

RECORDED = Path(__file__).parents[1] / "unit" / "launches"
_CONFIGS = Path(__file__).parents[2] / "src" / "blink" / "models" / "configs"
_LAYERS = 3  # enough for a first and a last one, and for layers that alternate
_BLOCK, _LENGTH, _TOKENS, _ROWS = 16, 4096, 2048, 256  # of what is served by default


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A model in a number format."""

    config: str  # one of models/configs
    format: str  # bf16, or a scheme of tests/shared/quantized_checkpoints.py, or as the config says
    kv_dtype: str = "auto"
    first_layer: str = ""  # another format of layer 0

    @property
    def name(self) -> str:
        """Name of the file."""
        parts = [self.config, self.format, f"kv-{self.kv_dtype}" if self.kv_dtype != "auto" else ""]
        return "-".join(filter(None, [*parts, f"first-{self.first_layer}" if self.first_layer else ""]))


_DENSE, _EXPERTS = ("llama-3-8b", "qwen3-32b", "phi-4"), "qwen3-30b-a3b"
_FORMATS = ("bf16", "fp8", "fp8-block", "awq")
CASES = [
    *(Case(config, form) for config, form in itertools.product((*_DENSE, _EXPERTS), _FORMATS)),
    Case("gpt-oss-20b", "mxfp4"),
    Case("llama-3-8b", "bf16", kv_dtype="fp8"),
    Case("llama-3-8b", "fp8", first_layer="bf16"),
    Case(_EXPERTS, "fp8-block", first_layer="bf16"),
]


def trace(case: Case) -> str:
    """Return what all steps of a model launch, as text: first each launch with a number, then the steps."""
    lines: list[str] = []
    with pretended_gpu(lines.append):
        model = load_case(case)
        batch = Batch.allocate(
            max_tokens=_TOKENS,
            max_rows=_ROWS,
            num_slots=1,
            max_blocks=_LENGTH // _BLOCK,
            max_model_len=_LENGTH,
            device=model.device,
        )
        runner = Runner(model)
        kv_cache = model.allocate_kv_cache(_LENGTH // _BLOCK, _BLOCK)
        steps: list[tuple[str, list[str]]] = []
        for decoding, (tokens, rows) in [
            *((True, size) for size in decode_graphs(_ROWS)),
            *((False, size) for size in mixed_graphs(_TOKENS, _ROWS)),
        ]:
            lines.clear()
            runner.compute_logits(batch, kv_cache, Bucket(tokens, rows, decoding=decoding))
            title = f"decode, {rows} rows" if decoding else f"prompts, {tokens} tokens of {rows} rows"
            steps.append((title, lines.copy()))
    launches = {
        line: f"#{number}" for number, line in enumerate(dict.fromkeys(line for _, step in steps for line in step))
    }
    shown = [f"{number} {line}" for line, number in launches.items()]
    shown += [f"{title}: {fold([launches[line] for line in step])}" for title, step in steps]
    return "".join(f"{line}\n" for line in shown)


def load_case(case: Case) -> Decoder:
    """Load a model without memory, within pretended_gpu()."""
    model = _load_with(case, case.format)
    if case.first_layer:
        model.layers[0] = _load_with(case, case.first_layer).layers[0]
    return model


def _load_with(case: Case, scheme: str) -> Decoder:
    values: dict[str, Any] = json.loads((_CONFIGS / case.config / "config.json").read_text())
    values["num_hidden_layers"] = _LAYERS
    if "layer_types" in values:
        values["layer_types"] = values["layer_types"][:_LAYERS]
    if scheme in SCHEMES:
        values["quantization_config"] = SCHEMES[scheme]
    elif scheme != "mxfp4":
        values.pop("quantization_config", None)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values))
        config = ModelConfig(
            model=folder,
            load_format="dummy",
            max_model_len=_LENGTH,
            quantization="fp8" if scheme == "fp8" else "auto",
            kv_cache_dtype=case.kv_dtype,
        )
        return load_model(config, torch.device("cuda"), torch.bfloat16)


def main() -> None:
    """Record all."""
    RECORDED.mkdir(exist_ok=True)
    for case in CASES:
        (RECORDED / f"{case.name}.txt").write_text(trace(case))


if __name__ == "__main__":
    main()
