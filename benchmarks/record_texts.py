# SPDX-License-Identifier: Apache-2.0
"""Record what a real model answers to the chats that `blink bench` ships with, and which drafts it accepts.

A server with speculation answers one chat after the other. The file keeps each text in tokens and how many draft tokens
were accepted at each place of a draft. speculation_replay.py lets a model of another size write the same texts.

python benchmarks/record_texts.py --output benchmarks/recorded_texts.json -- --device=cpu
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import httpx
from speculation import serve

from blink import __version__
from blink.bench.chats import CHAT_KINDS, read_chats
from blink.speculation import MAX_DRAFTS

SEED = 1
_COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|draft_tokens)_total\S* (\S+)$", re.MULTILINE)
_ACCEPTED = re.compile(
    r'^vllm:spec_decode_num_accepted_tokens_per_pos_total\{.*position="(\d+)".*\} (\S+)$', re.MULTILINE
)
_TIMEOUT = 600


def read_counters(http: httpx.Client) -> dict[str, list[int]]:
    """Return from the server's metrics: drafts, draft tokens, and tokens that were accepted at each place."""
    page = http.get("/metrics").text
    found = {name: [int(float(value))] for name, value in _COUNTER.findall(page)}
    places = {int(place): int(float(value)) for place, value in _ACCEPTED.findall(page)}
    return found | {"accepted_at": [places[place] for place in range(MAX_DRAFTS)]}


def record(http: httpx.Client, kind: str, chat: dict[str, Any], temperature: float) -> dict[str, Any]:
    """Return one answer, in tokens, and what became of its drafts."""
    before = read_counters(http)
    asked = {"temperature": temperature, "seed": SEED, "return_token_ids": True, "max_tokens": 256}
    found = http.post("/v1/chat/completions", json=chat | asked).raise_for_status().json()
    after = read_counters(http)
    counts = {name: [now - then for now, then in zip(after[name], before[name], strict=True)] for name in after}
    [choice] = found["choices"]
    return {
        "kind": kind,
        "temperature": temperature,
        "prompt": found["prompt_token_ids"],
        "answer": choice["token_ids"],
        "prediction": tokenize(http, chat["prediction"]["content"]) if "prediction" in chat else [],
        "schema": chat["response_format"]["json_schema"]["schema"] if "response_format" in chat else None,
        "drafts": counts["drafts"][0],
        "draft_tokens": counts["draft_tokens"][0],
        "accepted_at": counts["accepted_at"],
    }


def tokenize(http: httpx.Client, text: str) -> list[int]:
    """Return the tokens of a text alone."""
    asked = {"prompt": text, "add_special_tokens": False}
    return http.post("/tokenize", json=asked).raise_for_status().json()["tokens"]


def show(texts: list[dict[str, Any]]) -> str:
    """Return the table: each kind and temperature, and the share of drafts that were right up to each place."""
    lines = [f"{'kind':>8} {'temperature':>12} {'texts':>6} {'tokens':>7} {'tokens/step':>12}  accepted at places"]
    for kind, temperature in dict.fromkeys((text["kind"], text["temperature"]) for text in texts):
        chosen = [text for text in texts if (text["kind"], text["temperature"]) == (kind, temperature)]
        places = [sum(text["accepted_at"][place] for text in chosen) for place in range(MAX_DRAFTS)]
        drafts, decoded = sum(text["drafts"] for text in chosen), sum(len(text["answer"]) - 1 for text in chosen)
        shares = " ".join(f"{count / drafts:.2f}" for count in places if count) if drafts else "none"
        rate = decoded / (decoded - sum(places))
        lines.append(f"{kind:>8} {temperature:>12} {len(chosen):>6} {decoded:>7} {rate:>12.2f}  {shares}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flags", nargs="*", help="behind --: flags of the server")
    parser.add_argument("--model", default="", help="empty: the default one")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--speculative-config", default='{"method": "ngram", "num_speculative_tokens": 7}')
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    options.rows = [1]
    texts = list[dict[str, Any]]()
    with serve(options, drafts=True) as url, httpx.Client(base_url=url, timeout=_TIMEOUT, trust_env=False) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        for kind in CHAT_KINDS:
            chats = {json.dumps(chat): chat for chat in read_chats(kind, 100)}
            texts += [record(http, kind, chat, at) for at in options.temperatures for chat in chats.values()]
    print(show(texts))
    head = {"model": model, "version": __version__, "speculative_config": json.loads(options.speculative_config)}
    lines = ",\n".join(json.dumps(text) for text in texts)
    options.output.write_text(f'{json.dumps(head | {"seed": SEED})[:-1]}, "texts": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
