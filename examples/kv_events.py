# SPDX-License-Identifier: Apache-2.0
"""A router's view of one server: it follows the server's KV events, and predicts what each prompt will find cached.

pip install '.[kv-events]' openai  # in a checkout
blink serve --kv-events-config '{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:5558"}'
python examples/kv_events.py
"""

import os

import msgspec
import zmq
from openai import OpenAI

url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
model = client.models.list().data[0].id
context = zmq.Context()
listener = context.socket(zmq.SUB)
listener.setsockopt(zmq.SUBSCRIBE, b"")
listener.connect(os.environ.get("KV_EVENTS", "tcp://127.0.0.1:5557"))
asker = context.socket(zmq.DEALER)
asker.connect(os.environ.get("KV_REPLAY", "tcp://127.0.0.1:5558"))
blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}  # by hash: the block before, and the block's tokens


def apply(batch: bytes) -> None:
    """Follow the events of one batch."""
    for name, *values in msgspec.msgpack.decode(batch)[1]:
        if name == "BlockStored":
            hashes, parent, tokens, size = values[:4]
            for at, block in enumerate(hashes):
                blocks[block], parent = (parent, tuple(tokens[at * size : (at + 1) * size])), block
        elif name == "BlockRemoved":
            for block in values[0]:
                blocks.pop(block, None)
        else:
            blocks.clear()


def predict(prompt: list[int], size: int = 16) -> int:
    """Return how many tokens of a prompt are cached; the server always computes the last one."""
    known, parent, found = {own: name for name, own in blocks.items()}, None, 0
    while found + size < len(prompt) and (parent := known.get((parent, tuple(prompt[found : found + size])))):
        found += size
    return found


asker.send_multipart((b"", (0).to_bytes(8, "big")))  # what came before we listened
while (parts := asker.recv_multipart())[1] != (-1).to_bytes(8, "big", signed=True):
    apply(parts[2])
for prompt in ([*range(10, 90)], [*range(10, 90)], [*range(10, 60), *range(20, 50)], [*range(15, 95)]):
    predicted = predict(prompt)
    usage = client.completions.create(model=model, prompt=prompt, max_tokens=1).usage
    assert usage and usage.prompt_tokens_details
    print(f"{len(prompt)} tokens: predicted {predicted} cached, found {usage.prompt_tokens_details.cached_tokens}")
    while listener.poll(200):  # events follow a hundred times a second
        apply(listener.recv_multipart()[2])
