# SPDX-License-Identifier: Apache-2.0
"""What a step takes with a draft head, and what it gives at a forced acceptance, on a GPU with random weights.

A model of a family with a draft layer of its own (MTP) drafts with that. Others have an EAGLE-3 head of the shape of
those that are published: a layer as the model's, and 32,000 tokens. Each graph is timed as at boot, with the same
context. A step with drafts verifies those of the step before, and guesses anew.
TPOT is its time by the tokens that it gives if so many are accepted, as measured for published heads elsewhere.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from blink.config import EngineConfig, ModelConfig
from blink.engine.costs import describe_step
from blink.engine.geometry import list_graphs
from blink.engine.gpu import GpuEngine
from blink.models.families import FAMILIES
from blink.models.mlps import DenseMlp
from blink.models.weights.source import read_spec

_DRAFT_VOCAB = 32000


class TimedEngine(GpuEngine):
    """An engine that is never started."""

    def time_rows(self, rows: int, context: int, *, guesses: bool = True, repeats: int = 5) -> float:
        """Return the milliseconds of the smallest graph that decodes so many rows, the least of some runs.

        guesses: whether a head, if there is one, guesses in it.
        """
        buckets = [graph.bucket for graph in list_graphs(self._geometry)]
        fitting = (i for i, one in enumerate(buckets) if one.decoding and one.rows >= rows)
        index = next(i for i in fitting if buckets[i].skips_guesses is not guesses)
        bucket = buckets[index]
        describe_step(self._batch, self._geometry, bucket.tokens, bucket.rows, decoding=True, context=context)
        return 1e3 * min(self._time_step(index) for _ in range(repeats))


def write_head(folder: Path, model: Path) -> Path:
    """Write a random head for a model."""
    spec, draw = read_spec(model), torch.Generator().manual_seed(1)
    attention, mlp, hidden = spec.attentions[0], spec.layers[0].mlp, spec.hidden_size
    assert isinstance(mlp, DenseMlp)
    inner = mlp.size
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (attention.q_size, 2 * hidden),
        "midlayer.self_attn.k_proj": (attention.kv_size, 2 * hidden),
        "midlayer.self_attn.v_proj": (attention.kv_size, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, attention.out_size),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (_DRAFT_VOCAB, hidden),
    }
    tensors = {
        f"{name}.weight": torch.empty(shape, dtype=torch.bfloat16).normal_(0, 1 / math.sqrt(shape[1]), generator=draw)
        for name, shape in shapes.items()
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
    tensors["d2t"] = torch.arange(_DRAFT_VOCAB) * (spec.vocab_size // _DRAFT_VOCAB) - torch.arange(_DRAFT_VOCAB)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "vocab_size": spec.vocab_size,
        "draft_vocab_size": _DRAFT_VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def boot(options: argparse.Namespace, method: dict[str, Any]) -> TimedEngine:
    """Boot an engine, with a head if a method is given."""
    fields = method | {"num_speculative_tokens": options.drafts}
    return TimedEngine(
        EngineConfig(
            region=f"bench-{os.getpid()}-{secrets.token_hex(3)}",
            model=ModelConfig(model=str(options.model), load_format="dummy", max_model_len=4096),
            device="cuda",
            num_gpu_blocks_override=4096,
            max_num_seqs=max(options.rows),
            max_num_batched_tokens=max(64, max(options.rows) * (1 + options.drafts)),
            speculative_config=json.dumps(fields) if method else "",
        )
    )


def choose_method(folder: Path, model: Path) -> dict[str, Any]:
    """Return how a model is drafted for: by its own layer if it has one, else by a head that is written to a folder."""
    if FAMILIES[read_spec(model).architecture].has_mtp:
        return {"method": "mtp"}
    return {"method": "eagle3", "model": str(write_head(folder, model))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="directory with a config.json; weights are random")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--drafts", type=int, default=3, help="draft tokens of a sequence in one step")
    parser.add_argument("--tokens-per-step", type=float, default=2.6, help="that a sequence is given, forced")
    parser.add_argument("--context", type=int, default=512)
    options = parser.parse_args()
    plain, times = boot(options, {}), dict[str, list[float]]()
    times["plain"] = [plain.time_rows(rows, options.context) for rows in options.rows]
    plain.remove_region()
    with tempfile.TemporaryDirectory() as folder:
        engine = boot(options, choose_method(Path(folder), options.model))
    times["rest"] = [engine.time_rows(rows, options.context, guesses=False) for rows in options.rows]
    times["guess"] = [engine.time_rows(rows, options.context) for rows in options.rows]
    verifying = [rows * (1 + options.drafts) for rows in options.rows]
    times["verify"] = [engine.time_rows(rows, options.context) for rows in verifying]
    engine.remove_region()
    print(f"{'rows':>5} {'plain ms':>9} {'at rest':>8} {'guessing':>9} {'verifying':>10} {'TPOT ms':>8} {'ratio':>6}")
    for rows, before, rest, guess, verify in zip(options.rows, *times.values(), strict=True):
        tpot = verify / options.tokens_per_step
        print(f"{rows:>5} {before:>9.3f} {rest:>8.3f} {guess:>9.3f} {verify:>10.3f} {tpot:>8.3f} {tpot / before:>6.2f}")


if __name__ == "__main__":
    main()
