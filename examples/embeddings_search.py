# SPDX-License-Identifier: Apache-2.0
"""Search in texts by meaning: embed them once, then compare each question with all of them.

blink serve Qwen/Qwen3-Embedding-0.6B    # in another terminal
pip install openai numpy
python examples/embeddings_search.py
"""

import os

import numpy as np
from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id

TEXTS = [
    "The lighthouse keeper counted seven ships.",
    "Bread needs flour, water, salt and time.",
    "A GPU multiplies matrices.",
]
QUESTIONS = ["How do I bake?", "Who watches the sea?"]
# Queries carry an instruction, documents do not: the model was trained so.
TASK = "Given a web search query, retrieve relevant passages that answer the query"


def embed(texts: list[str]) -> np.ndarray:
    """Return an embedding of length 1 for each text."""
    data = client.embeddings.create(model=model, input=texts).data
    return np.array([entry.embedding for entry in data])


documents = embed(TEXTS)
for question, vector in zip(QUESTIONS, embed([f"Instruct: {TASK}\nQuery:{each}" for each in QUESTIONS]), strict=True):
    scores = documents @ vector  # cosines, as all lengths are 1
    best = int(scores.argmax())
    print(f"{question!r}: {TEXTS[best]!r} ({scores[best]:.3f})")
