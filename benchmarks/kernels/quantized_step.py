# SPDX-License-Identifier: Apache-2.0
"""Time steps of a bundled model in 16 bits, FP8 and 4 bits: decoding rows, and prompts; random weights.

Each step is a graph; medians of replays. How GEMMs are computed is chosen as a server chooses. FP8 is that of
--quantization fp8, the others that of a checkpoint.

Run with: python benchmarks/kernels/quantized_step.py [--model llama-3-8b] [--formats bf16 fp8 int4 int4-fp8-head]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from decode_layer import BLOCK_SIZE, Run, make_batch, time_graph

import blink.models
from blink.config import ModelConfig
from blink.formats.schemes import GROUP
from blink.kernels.batch import Batch, Header
from blink.kernels.gpu import autotuner
from blink.kernels.gpu.launch import compile_ahead
from blink.models.decoder import Decoder
from blink.models.weights.loader import load_model
from blink.plan.execution_plan import StepPlan
from blink.plan.site import Bucket
from blink.quantize.config import QuantizeConfig
from blink.quantize.directory import describe_quantization
from blink.runner import gpu_device
from blink.runner.planner import Refused
from blink.runner.run import Runner
from blink.runner.sites import ModelSites

_CONFIGS = Path(blink.models.__path__[0]) / "configs"
FORMATS = {
    "bf16": None,
    "fp8": None,
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int4": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "int4-fp8-head": describe_quantization(QuantizeConfig(format="int4", quantize_lm_head=True), GROUP, []),
    "mxfp4": {"quant_method": "mxfp4"},  # of gpt-oss-20b
}


def load(model: str, form: str, folder: Path) -> Decoder:
    """Load a bundled model with random weights of a format."""
    config = json.loads((_CONFIGS / model / "config.json").read_text())
    config["quantization_config"] = FORMATS[form]
    (folder / "config.json").write_text(json.dumps(config))
    chosen = "fp8" if form == "fp8" else "auto"
    options = ModelConfig(model=str(folder), load_format="dummy", max_model_len=4096, quantization=chosen)
    return load_model(options, torch.device("cuda"), torch.bfloat16)


def make_prompt_batch(tokens: int, vocab_size: int, beside: int, context: int) -> Batch:
    """Return the batch of one prompt behind so many decoding rows with that context."""
    total, longest = beside + tokens, max(tokens, context)
    blocks = -(-longest // BLOCK_SIZE)
    batch = Batch.allocate(
        max_tokens=total, max_rows=beside + 1, num_slots=beside + 1, max_blocks=blocks, max_model_len=longest,
        device="cuda",
    )  # fmt: skip
    batch.header[Header.NUM_ROWS], batch.header[Header.NUM_TOKENS] = beside + 1, total
    batch.header[Header.NUM_DECODE_ROWS] = beside
    batch.input_ids.random_(vocab_size)
    batch.row_slots.copy_(torch.arange(beside + 1))
    batch.query_starts.copy_(torch.tensor([*range(beside + 1), total]))
    batch.context_lens.copy_(torch.tensor([context] * beside + [tokens]))
    batch.block_tables.copy_(torch.arange((beside + 1) * blocks).view(beside + 1, blocks))
    places = torch.tensor([context - 1] * beside + [*range(tokens)])
    rows = torch.tensor([*range(beside)] + [beside] * tokens)
    batch.positions.copy_(places)
    batch.kv_slots.copy_(rows * blocks * BLOCK_SIZE + places)
    return batch


def main() -> None:
    """Print a table of milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS)[:-1], choices=FORMATS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 16, 32, 64, 128])
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--beside", type=int, default=0, metavar="ROWS", help="that decode in steps with a prompt")
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--most-own", type=int, help="tokens of steps that take Blink's own products, of more cuBLAS")
    options = parser.parse_args()
    if options.most_own:
        limit_own_gemms(options.most_own)
    columns = [*(f"{rows} rows" for rows in options.rows), *(f"prompt {tokens}" for tokens in options.prompts)]
    width = max(map(len, FORMATS))
    print(f"{'ms':>{width}}" + "".join(f"{column:>12}" for column in columns), flush=True)
    for form in options.formats:
        with tempfile.TemporaryDirectory() as folder:
            decoder = load(options.model, form, Path(folder))
            runs = [make_decoding(decoder, rows, options.context) for rows in options.rows]
            runs += [make_prompt(decoder, tokens, options.beside, options.context) for tokens in options.prompts]
            compile_ahead(lambda runs=runs: [run() for run in runs])
            with autotuner.tuning(Path(folder) / "products.json"):
                for run in runs:
                    run()
        times = [time_graph(run) for run in runs]
        print(f"{form:>{width}}" + "".join(f"{time / 1e3:>12.3f}" for time in times), flush=True)
        del decoder, runs
        torch.cuda.empty_cache()


def limit_own_gemms(most: int) -> None:
    """Let steps of more tokens take other GEMMs than Blink's own."""
    plan_writers = gpu_device.plan_writers

    def plan_up_to_most(model: ModelSites, bucket: Bucket) -> StepPlan:
        if bucket.tokens > most:
            raise Refused(f"more than {most} tokens")
        return plan_writers(model, bucket)

    gpu_device.MAX_MIXED_TOKENS, gpu_device.plan_writers = most, plan_up_to_most


def make_decoding(decoder: Decoder, rows: int, context: int) -> Run:
    """Return a step of decoding rows."""
    blocks = -(-context // BLOCK_SIZE)
    batch = make_batch(rows, context, blocks, decoder.spec.vocab_size)
    cache = decoder.allocate_kv_cache(rows * blocks, BLOCK_SIZE)
    runner = Runner(decoder)
    return lambda: runner.compute_logits(batch, cache, Bucket(rows, rows, decoding=True))


def make_prompt(decoder: Decoder, tokens: int, beside: int = 0, context: int = 0) -> Run:
    """Return a step of one prompt, with so many decoding rows beside it."""
    batch = make_prompt_batch(tokens, decoder.spec.vocab_size, beside, context)
    cache = decoder.allocate_kv_cache(batch.block_tables.numel(), BLOCK_SIZE)
    runner = Runner(decoder)
    return lambda: runner.compute_logits(batch, cache, Bucket(beside + tokens, beside + 1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
