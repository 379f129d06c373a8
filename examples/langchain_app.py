# SPDX-License-Identifier: Apache-2.0
"""A LangChain pipeline on Blink: a prompt, the model, a parser; and an answer in a Pydantic model.

blink serve                       # in another terminal
pip install langchain-openai
python examples/langchain_app.py
"""

import os
from typing import Literal

import httpx
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
key = os.environ.get("OPENAI_API_KEY", "none")
name = httpx.get(f"{url}/models", headers={"Authorization": f"Bearer {key}"}).json()["data"][0]["id"]
model = ChatOpenAI(model=name, base_url=url, api_key=key, temperature=0, max_tokens=256)

prompt = ChatPromptTemplate.from_messages([("system", "You translate to {language}."), ("user", "{text}")])
chain = prompt | model | StrOutputParser()
for text in chain.stream({"language": "French", "text": "Good morning!"}):
    print(text, end="", flush=True)
print()

# Several inputs run at the same time: the server batches them.
print(chain.batch([{"language": "German", "text": word} for word in ("bread", "water", "salt")]))


class Opinion(BaseModel):
    """What somebody thinks of something."""

    sentiment: Literal["good", "bad", "mixed"]


# The engine keeps the answer to the schema.
judge = model.with_structured_output(Opinion, method="json_schema")
print(judge.invoke("What a lovely keyboard!"))
