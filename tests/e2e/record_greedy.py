# SPDX-License-Identifier: Apache-2.0
"""Write greedy_tokens.json: what Hugging Face transformers generates from pieces of the licence's text.

Run as a program. The gate compares with the recording; `make test-all` compares with transformers itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from blink.config import FrontendConfig
from blink.models.weights.files import resolve_model
from blink.text.assets import load_assets

RECORDING = Path(__file__).with_name("greedy_tokens.json")
LENGTHS = (5, 16, 17, 33, 64, 128, 300)
NEW_TOKENS = 20
# A token that beats the next one by this much in its logit does so on any machine.
CLEAR_MARGIN = 0.02


def load_transformers_model() -> Any:
    """Return the default model's file, loaded by transformers itself in float32."""
    path = resolve_model("")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # an end token is one like others
    return model


@torch.inference_mode()
def generate_with_transformers(model: Any, prompt: list[int], new_tokens: int) -> tuple[list[int], float]:
    """Return the greedy tokens and the least margin with which one of them won."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        max_new_tokens=new_tokens,
        pad_token_id=0,
    )
    best = torch.cat(found.logits).topk(2).values
    return found.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def main() -> None:
    """Record one clear answer for each length."""
    model = load_transformers_model()
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    tokens = load_assets(FrontendConfig()).tokenizer.encode(text, add_special_tokens=False)
    recorded: list[dict[str, list[int]]] = []
    for length in LENGTHS:
        for start in range(50, len(tokens) - length, 61):
            output, margin = generate_with_transformers(model, tokens[start : start + length], NEW_TOKENS)
            if margin > CLEAR_MARGIN:
                recorded.append({"prompt": tokens[start : start + length], "output": output})
                break
    assert len(recorded) == len(LENGTHS)
    RECORDING.write_text("\n".join(["[", ",\n".join(map(json.dumps, recorded)), "]"]) + "\n")


if __name__ == "__main__":
    main()
