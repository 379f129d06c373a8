# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of an adapter that is in a GPU's memory, and of one that is copied there first.

The engine has twice as many adapters as slots. Adapters are random, of all matrices of attention and MLP, and of a
model with Llama's names. Their requests come one at a time: again for the same adapter, then for the one whose last
use lies back furthest. With --stopped, requests of the model and of all adapters then come at once, again and again,
while the engine's process runs and while it is stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from dummy_engine import make_config
from engine_client import time_first_token
from safetensors.torch import save_file
from tensor_parallel import run_process, stopped

from blink.adapters.protocol import ask_load
from blink.config import EngineConfig, ModelConfig
from blink.link.client import EngineClient
from blink.link.queue_pair import KvOrigin
from blink.link.variant import BASE_MODEL, ModelVariant
from blink.lora_config import LoraConfig
from blink.region.layout import CqeKind
from blink.sampling_params import SamplingParams

_SLOTS = 2
_TOKENS = 128  # of an answer next to a stopped engine


def list_shapes(config: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    """Yield the name, rows and columns of each matrix that an adapter changes."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    attention = {"q_proj": (hidden, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    attention["o_proj"] = hidden, hidden
    mlp = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    for layer in range(config["num_hidden_layers"]):
        for part, shapes in (("self_attn", attention), ("mlp", mlp)):
            for name, (rows, columns) in shapes.items():
                yield f"base_model.model.model.layers.{layer}.{part}.{name}", rows, columns


def write_adapter(folder: Path, shapes: list[tuple[str, int, int]], rank: int, seed: int) -> Path:
    """Write an adapter in PEFT's form."""
    draw, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, rows, columns in shapes:
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, columns, generator=draw).mul_(0.02).bfloat16()
        tensors[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=draw).mul_(0.02).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    names = sorted({name.split(".")[-1] for name, _, _ in shapes})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def first_token(client: EngineClient, prompt: np.ndarray, variant: ModelVariant) -> float:
    """Return the milliseconds from submission to the first of two tokens, as the client sees them."""
    params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
    return time_first_token(client, lambda: client.submit(prompt, params, seed=0, origin=KvOrigin(variant=variant)))


def decode_for(seconds: float, client: EngineClient, prompt: np.ndarray, variants: list[ModelVariant]) -> float:
    """Decode a sequence of each variant, all at once, again and again; return the median TPOT in milliseconds."""
    params = SamplingParams(max_tokens=_TOKENS, ignore_eos=True, temperature=0.0)
    end, found = time.monotonic() + seconds, list[float]()
    while time.monotonic() < end:
        times: dict[int, list[int]] = {
            client.submit(prompt, params, seed=0, origin=KvOrigin(variant=each)): [] for each in variants
        }
        while any(len(each) < _TOKENS for each in times.values()):
            if lost := client.tick():
                raise SystemExit(lost)
            for one in client.drain():
                if one["kind"] == CqeKind.TOKEN:
                    times[int(one["sequence"])].append(int(one["time_ns"]))
        found += ((each[-1] - each[0]) / (_TOKENS - 1) / 1e6 for each in times.values())
    return statistics.median(found)


def watch_stopped(
    client: EngineClient, process: int, prompt: np.ndarray, variants: list[ModelVariant], seconds: float
) -> None:
    """Print the TPOT p50 while the engine's process runs, and while it is stopped."""
    alone = decode_for(seconds, client, prompt, variants)
    with stopped(process):
        held = decode_for(seconds, client, prompt, variants)
    print(f"TPOT p50 {alone:.3f} ms, with a stopped engine process {held:.3f} ms, ratio {held / alone:.4f}")


def make_engine_config(options: argparse.Namespace) -> EngineConfig:
    """Return an engine with more adapters than slots."""
    model = ModelConfig(model=str(options.model), load_format="dummy", max_model_len=1024)
    config = make_config(model, device=options.device, num_blocks=1024, max_num_seqs=8)
    lora = LoraConfig(enable_lora=True, max_loras=_SLOTS, max_cpu_loras=2 * _SLOTS, max_lora_rank=options.rank)
    return replace(config, lora=lora)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = Path(__file__).parents[1] / "src/blink/models/configs/llama-3-8b"
    parser.add_argument("model", nargs="?", type=Path, default=shape, help="directory with a config.json")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--stopped", type=float, default=0, help="seconds to stop the engine's process for; 0: not")
    options = parser.parse_args()
    config = make_engine_config(options)
    shapes = list(list_shapes(json.loads((options.model / "config.json").read_text())))
    prompt = np.random.default_rng(0).integers(10, 1000, options.prompt_tokens).astype(np.int32)
    with tempfile.TemporaryDirectory() as folder, run_process(config) as (client, process):
        paths = [write_adapter(Path(folder, str(seed)), shapes, options.rank, seed) for seed in range(2 * _SLOTS)]
        held = [ask_load(config.region, str(path)) for path in paths]
        adapters = [each.variant for each in held]
        for adapter in 2 * adapters:
            first_token(client, prompt, adapter)
        times: dict[str, list[float]] = {"copied first": [], "in a slot": []}
        for turn in range(options.repeats):
            for name in times:
                times[name].append(first_token(client, prompt, adapters[turn % len(adapters)]))
        if options.stopped:
            watch_stopped(client, process, prompt, [BASE_MODEL, *adapters], options.stopped)
    size = sum((rows + columns) * options.rank * 2 for _, rows, columns in shapes) / 1e6
    print(f"adapters of {size:.0f} MB in 16 bits")
    for name, each in times.items():
        print(f"{name:14}{statistics.median(each):9.2f} ms, at most {max(each):.2f}")


if __name__ == "__main__":
    main()
