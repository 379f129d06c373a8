# SPDX-License-Identifier: Apache-2.0
"""An answer that is always JSON of a schema, read into a Pydantic model.

    blink serve                       # in another terminal
    pip install openai
    python examples/structured_json.py

The engine masks every token that would leave the schema. So even a small model cannot answer with invalid JSON.
"""

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id


class Ticket(BaseModel):
    """What a support desk wants to know of a message."""

    # Bounds keep the answer short: without them, max_tokens may cut the JSON.
    product: Literal["router", "phone", "television"]
    summary: str = Field(max_length=60)
    urgency: int = Field(ge=1, le=5)
    needs_technician: bool


message = "My router has been blinking red since this morning, and I cannot work. Please send somebody!"
answer = client.chat.completions.parse(
    model=model,
    messages=[{"role": "user", "content": f"Sort this message: {message}"}],
    response_format=Ticket,
    temperature=0,
    max_tokens=500,
)
ticket = answer.choices[0].message.parsed
assert ticket is not None
print(ticket.model_dump_json(indent=2))

# Other forms are a field of their own, as in vLLM: "regex", "choice", "grammar" or "json".
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": f"Is the writer angry? {message}"}],
    extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
)
print("angry:", answer.choices[0].message.content)
