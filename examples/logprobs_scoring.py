# SPDX-License-Identifier: Apache-2.0
"""Rank given texts by how likely the model finds them: for classification, reranking and evaluations.

blink serve                       # in another terminal
pip install openai
python examples/logprobs_scoring.py
"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id

QUESTION = "The capital of France is"
ANSWERS = [" Paris.", " Rome.", " a baguette."]

# "echo" with max_tokens 0 generates nothing: it returns the logprobs of the prompt's own tokens.
scored = client.completions.create(
    model=model,
    prompt=[QUESTION + answer for answer in ANSWERS],  # one choice for each
    echo=True,
    max_tokens=0,
    logprobs=1,
)
ranking = []
for answer, choice in zip(ANSWERS, scored.choices, strict=True):
    logprobs = choice.logprobs
    assert logprobs and logprobs.text_offset and logprobs.token_logprobs
    # Only the answer's tokens count: those that begin after the question.
    tokens = zip(logprobs.text_offset, logprobs.token_logprobs, strict=True)
    values = [value for offset, value in tokens if offset >= len(QUESTION)]
    # The mean, so that a long answer is not at a disadvantage.
    ranking.append((sum(values) / len(values), answer))

for score, answer in sorted(ranking, reverse=True):
    print(f"{score:8.3f} {answer!r}")
