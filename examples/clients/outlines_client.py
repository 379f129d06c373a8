# SPDX-License-Identifier: Apache-2.0
"""Outlines on Blink: text, a choice, a Pydantic model, a regular expression and a grammar, whole and streamed.

blink serve                       # in another terminal
pip install outlines openai
python examples/clients/outlines_client.py
"""

import os
from typing import Literal

import openai
import outlines
from outlines.types import CFG, Regex
from pydantic import BaseModel

V1 = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
client = openai.OpenAI(base_url=V1, api_key=os.environ.get("OPENAI_API_KEY", "none"))
name = client.models.list().data[0].id


class Person(BaseModel):
    """A person."""

    name: str
    age: int


GRAMMAR = """
root ::= number " + " number
number ::= [0-9]+
"""

for kind, model in (("openai", outlines.from_openai(client, name)), ("vllm", outlines.from_vllm(client, name))):
    print(kind, model("What is the capital of France?", max_tokens=100))
    print(kind, "streamed", "".join(model.stream("What is the capital of France?", max_tokens=100)))
    print(kind, Person.model_validate_json(str(model("Describe Anna.", Person, max_tokens=100))))

print(model("Was the film good or bad?", Literal["good", "bad"], max_tokens=20))
print(model("When did Blink start?", Regex(r"[0-9]{4}-[0-9]{2}"), max_tokens=20))
print(model("Write a sum.", CFG(GRAMMAR), max_tokens=20))
print("".join(model.stream("Was the film good or bad?", Literal["good", "bad"], max_tokens=20)))
