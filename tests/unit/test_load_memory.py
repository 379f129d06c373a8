# SPDX-License-Identifier: Apache-2.0
"""What loading a checkpoint takes of the host's memory beside the files, which are mapped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tiny_model import write_tiny_model

pytestmark = pytest.mark.long

LAYERS, HIDDEN, SIZE, VOCAB = 12, 768, 3072, 4096
# In a process of its own, whose private memory a thread watches while the weights come.
_LOAD = """
import sys, threading, time
from pathlib import Path
import torch
from blink.config import ModelConfig
from blink.models.weights.loader import load_model

def private() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

torch.ones(512, 512, dtype=torch.bfloat16) @ torch.ones(512, 512, dtype=torch.bfloat16)
before, most, is_over = private(), 0, False

def watch() -> None:
    global most
    while not is_over:
        most = max(most, private() - before)
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
model = load_model(ModelConfig(model=sys.argv[1]), torch.device("cpu"), torch.bfloat16)
is_over = True
thread.join()
print(most)
"""


def write_checkpoint(path: Path) -> tuple[int, int]:
    """Write a model of bfloat16 in a shard for each layer and one more; return the bytes of all and of the largest."""
    write_tiny_model(
        path, vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=SIZE, num_hidden_layers=LAYERS,
        num_attention_heads=12, num_key_value_heads=12,
    )  # fmt: skip
    shapes = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    shapes |= {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    shapes |= {f"mlp.{name}_proj": (SIZE, HIDDEN) for name in ("gate", "up")} | {"mlp.down_proj": (HIDDEN, SIZE)}
    shards = [{f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()} for layer in range(LAYERS)]
    shards.append({"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)})
    owners: dict[str, str] = {}
    for index, shard in enumerate(shards):
        file = f"part-{index}.safetensors"
        tensors = {f"{name}.weight": torch.ones(shape, dtype=torch.bfloat16) for name, shape in shard.items()}
        save_file(tensors, path / file)
        owners.update(dict.fromkeys(tensors, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owners}))
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
    return sum(sizes), max(sizes)


def test_loading_takes_little_more_than_the_weights_and_one_shard(tmp_path: Path) -> None:
    size, shard = write_checkpoint(tmp_path)
    command = [sys.executable, "-c", _LOAD, str(tmp_path)]
    most = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert size * 0.95 < most < 1.1 * size + shard
