# SPDX-License-Identifier: Apache-2.0
"""How long new weights take, from disk and by a stream of tensors.

    python benchmarks/weight_update.py CONFIG [--layers N] [--device cpu]

CONFIG is the folder of a Llama's config.json, such as src/blink/models/configs/llama-3-8b. The weights are random, in a
temporary folder. Each time is the least of three.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from blink import LLM

_TIMES = 3


def write_weights(folder: Path, config: Path, layers: int) -> None:
    """Write a Llama of random bfloat16 weights."""
    sizes = json.loads((config / "config.json").read_text())
    sizes["num_hidden_layers"] = layers or sizes["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(sizes))
    hidden, inner, heads = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_attention_heads"]
    head = sizes.get("head_dim") or hidden // heads
    queries, keys = heads * head, sizes["num_key_value_heads"] * head
    shapes = {"model.embed_tokens": (sizes["vocab_size"], hidden), "model.norm": (hidden,)}
    if not sizes.get("tie_word_embeddings"):
        shapes["lm_head"] = (sizes["vocab_size"], hidden)
    for index in range(sizes["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
        shapes |= {f"{layer}.self_attn.{name}": shape for name, shape in attention.items()}
        shapes[f"{layer}.self_attn.o_proj"] = hidden, queries
        shapes |= {f"{layer}.mlp.{name}": (inner, hidden) for name in ("gate_proj", "up_proj")}
        shapes[f"{layer}.mlp.down_proj"] = hidden, inner
        shapes |= {f"{layer}.{name}": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    tensors = {f"{name}.weight": torch.randn(shape).mul_(0.02).to(torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")


def least(run: Callable[[], object]) -> float:
    """Return the seconds that something takes, the least of some times."""
    times = list[float]()
    for _ in range(_TIMES):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="the folder of a Llama's config.json")
    parser.add_argument("--layers", type=int, default=0, help="so many of the model's; 0: all")
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_weights(folder, asked.config, asked.layers)
        size = (folder / "model.safetensors").stat().st_size / 1e9
        options = {"max_num_seqs": 4, "max_model_len": 2048, "num_gpu_blocks_override": 1024}
        with LLM(place, device=asked.device, dtype="bfloat16", skip_tokenizer_init=True, **options) as llm:
            disk = least(lambda: llm.update_weights_from_disk(place))
            weights = load_file(folder / "model.safetensors")
            stream = least(lambda: llm.update_weights_from_tensor(weights))
            print(f"{size:.2f} GB: from disk {disk:.3f} s, by a stream {stream:.3f} s")


if __name__ == "__main__":
    main()
