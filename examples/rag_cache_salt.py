# SPDX-License-Identifier: Apache-2.0
"""Questions on one document: the prefix cache holds the document, and a salt keeps tenants apart.

    blink serve                       # in another terminal
    pip install openai
    python examples/rag_cache_salt.py

The document comes first in the prompt and is computed once. Later questions on it start much sooner. But whoever shares
a cache can find out by timing what others have sent. So requests share cached prefixes only if their `cache_salt` is
equal.
"""

import os
import secrets

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
model = client.models.list().data[0].id

# What a retriever would find. Keep the order of passages stable: a prefix is equal up to the first difference.
PASSAGES = [f"Article {i}: a guest may return item {i} within {10 + i} days, if it is unused." for i in range(1, 13)]
DOCUMENT = "\n".join(PASSAGES)
SALTS = {tenant: secrets.token_hex(16) for tenant in ("alice", "bob")}  # keep them secret, one for each tenant


def ask(tenant: str, question: str) -> None:
    """Ask about the document, and show how much of the prompt was cached."""
    answer = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": f"Answer from these articles.\n{DOCUMENT}"},
            {"role": "user", "content": question},
        ],
        max_tokens=32,
        extra_body={"cache_salt": SALTS[tenant]},
    )
    usage = answer.usage
    assert usage and usage.prompt_tokens_details
    print(f"{tenant}: {usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} prompt tokens were cached")


ask("alice", "Until when may I return item 3?")  # computes the document
ask("alice", "And item 7?")  # finds it
ask("bob", "Until when may I return item 3?")  # another salt: does not
ask("bob", "And item 7?")
