# SPDX-License-Identifier: Apache-2.0
"""DSPy on Blink: a signature with types, a chain of thought, an agent with a tool and JSON.

blink serve                       # in another terminal
pip install dspy
python examples/clients/dspy_client.py
"""

import os
from typing import Any, Literal

import dspy
import httpx

V1 = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
KEY = os.environ.get("OPENAI_API_KEY", "none")
MODEL = httpx.get(f"{V1}/models", headers={"Authorization": f"Bearer {KEY}"}).json()["data"][0]["id"]


def forecast(city: str) -> str:
    """Tell the weather in a city."""
    return f"{city}: sunny, 27 degrees"


class Classify(dspy.Signature):
    """Classify a review."""

    review: str = dspy.InputField()
    sentiment: Literal["good", "bad"] = dspy.OutputField()
    stars: int = dspy.OutputField()


dspy.configure(lm=dspy.LM(f"hosted_vllm/{MODEL}", api_base=V1, api_key=KEY, max_tokens=400, cache=False))
capital: Any = dspy.Predict("question -> answer")(question="What is the capital of France?")
print(capital.answer)

review: Any = dspy.Predict(Classify)(review="I would buy it again.")
print(review.sentiment, review.stars + 1)

with dspy.context(adapter=dspy.JSONAdapter()):
    review = dspy.Predict(Classify)(review="It broke on the first day.")
    print(review.sentiment, review.stars + 1)

thought: Any = dspy.ChainOfThought("question -> answer: int")(question="What is 6 times 7?")
print(thought.reasoning, thought.answer + 1)

agent: Any = dspy.ReAct("question -> answer", tools=[forecast])(question="How is the weather in Rome?")
print(agent.trajectory["observation_0"], "|", agent.answer)
