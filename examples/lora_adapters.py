# SPDX-License-Identifier: Apache-2.0
"""Ask the base model and each of its LoRA adapters the same: the `model` field picks the adapter.

blink serve --device cpu --enable-lora --max-loras 2 --lora-modules sql=/adapters/sql    # in another terminal
pip install openai
python examples/lora_adapters.py "List all users:"
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
question = sys.argv[1] if len(sys.argv) > 1 else "The capital of France is"


def ask(model: str) -> str:
    """Return a model's answer."""
    answer = client.completions.create(model=model, prompt=question, max_tokens=24, temperature=0)
    return answer.choices[0].text


# An adapter has the base model as its parent; requests with different adapters run in the same step.
models = list(client.models.list().data)
with ThreadPoolExecutor(max_workers=8) as workers:
    answers = list(workers.map(ask, [model.id for model in models]))
for model, answer in zip(models, answers, strict=True):
    parent = getattr(model, "parent", None)
    print(f"{model.id} ({f'adapter of {parent}' if parent else 'base model'}): {answer!r}")
