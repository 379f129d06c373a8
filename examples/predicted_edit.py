# SPDX-License-Identifier: Apache-2.0
"""An edit of code, of which most stays as it is: the old code is the prediction, and is verified many tokens a step.

    blink serve --speculative-config '{"method": "ngram", "num_speculative_tokens": 7}'
    pip install openai
    python examples/predicted_edit.py

The answer is the one without a prediction, but comes sooner.
"""

import os
import time

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id

code = """
class Account:
    def __init__(self, owner):
        self.owner = owner
        self.amount = 0

    def deposit(self, value):
        if value <= 0:
            raise ValueError("nothing to deposit")
        self.amount += value

    def withdraw(self, value):
        if value > self.amount:
            raise ValueError("not enough money")
        self.amount -= value
"""
for prediction in (None, code):
    start = time.monotonic()
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"Rename amount to balance. Answer with the code alone:\n{code}"}],
        temperature=0,
        max_tokens=160,
        prediction={"type": "content", "content": prediction} if prediction else None,
    )
    seconds, usage = time.monotonic() - start, answer.usage
    assert usage is not None
    details = usage.completion_tokens_details
    accepted = (details and details.accepted_prediction_tokens) or 0
    rejected = (details and details.rejected_prediction_tokens) or 0
    print(answer.choices[0].message.content)
    print(f"[{usage.completion_tokens} tokens in {seconds:.1f} s; predicted: {accepted} kept, {rejected} given up]")
