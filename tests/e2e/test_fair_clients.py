# SPDX-License-Identifier: Apache-2.0
"""What one HTTP client's largest legal use costs another's first token, against the rule of docs/scheduling.md.

Counted in steps of the model, so that it holds on a machine of any speed.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import numpy as np
import pytest

from blink.region.layout import SQE
from blink.region.memory import QueuePairAddresses, open_region
from processes import Engine, Frontend, answers, run_engine, start_frontend, stop, wait_for
from tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

PLACES, SEQUENCES, MODEL_LEN, STEP_TOKENS = 4, 64, 512, 256
SHARE = SEQUENCES // 2
QUEUE_AGE = 2.0
_PATIENCE = 300.0  # seconds; reached only by failures
_SLACK = 25  # steps: what passes between an answer and the look at the counter
_KEYS = ["--api-key=greedy", "--api-key=modest"]
PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = [str(write_tiny_model(tmp_path_factory.mktemp("fair"))), "--load-format=dummy"]
    sizes = [f"--max-num-seqs={PLACES}", f"--max-sequences-per-worker={SEQUENCES}", f"--max-model-len={MODEL_LEN}"]
    policy = ["--scheduling-policy=priority", f"--max-queue-age={QUEUE_AGE}", "--num-gpu-blocks-override=1024"]
    with run_engine(*model, *sizes, *policy, "--no-enable-prefix-caching", "--num-queue-pairs=2") as engine:
        yield engine


@pytest.fixture(scope="module")
def frontend(engine: Engine) -> Iterator[Frontend]:
    with _frontend(engine, *_KEYS, "--max-client-share=0.5") as frontend:
        yield frontend


@contextmanager
def _frontend(engine: Engine, *flags: str) -> Iterator[Frontend]:
    frontend = start_frontend(engine.region, "--skip-tokenizer-init", *flags, wait=False)
    try:
        wait_for(lambda: answers(frontend) == 200, _PATIENCE)
        yield frontend
    finally:
        stop(frontend.process)


def steps(frontend: Frontend) -> float:
    return frontend.metric("blink:num_steps_total")


def first_token(frontend: Frontend, key: str, **fields: object) -> tuple[float, float]:
    """Ask for one token; return the steps and the seconds until it is there."""
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, **fields}
    headers = {"Authorization": f"Bearer {key}"}
    before, started = steps(frontend), time.monotonic()
    response = httpx.post(
        f"{frontend.url}/v1/completions", json=body, headers=headers, timeout=_PATIENCE, trust_env=False
    )
    assert response.status_code == 200, response.text
    return steps(frontend) - before, time.monotonic() - started


@contextmanager
def flood(frontend: Frontend, spare: int = 0, **fields: object) -> Iterator[None]:
    """Hold all but `spare` of the sequences that a client may have; ask again for each request that ends."""
    size = int(str(fields.get("n", 1)))
    with ExitStack() as stack:
        over = threading.Event()
        threads = [
            threading.Thread(target=_ask_on, args=(frontend, fields, over)) for _ in range((SHARE - spare) // size)
        ]
        stack.callback(lambda: [thread.join() for thread in threads])
        stack.callback(over.set)
        for thread in threads:
            thread.start()
        # All places are taken, and as many again wait.
        wait_for(lambda: frontend.metric("vllm:num_requests_running") >= PLACES, _PATIENCE)
        wait_for(lambda: frontend.metric("vllm:num_requests_waiting") >= PLACES, _PATIENCE)
        yield


def _ask_on(frontend: Frontend, fields: dict[str, object], over: threading.Event) -> None:
    headers = {"Authorization": "Bearer greedy"}
    body = {"prompt": PROMPT, "ignore_eos": True, "stream": True, **fields}
    with httpx.Client(base_url=frontend.url, headers=headers, timeout=_PATIENCE, trust_env=False) as client:
        while not over.is_set():
            with client.stream("POST", "/v1/completions", json=body) as response:
                for _ in response.iter_lines():
                    if over.is_set():
                        return


# The rule: a place is free when the shortest running sequence ends, so after one generation at most, its own prompt's
# steps included; then the prompt takes its share of steps, here one.
LONG_PROMPT, FEW, MANY = MODEL_LEN - 12, 8, 120
SHAPES: dict[str, tuple[dict[str, object], int]] = {
    "many sequences": ({"n": SHARE // 4, "max_tokens": MANY}, MANY),
    # Four prompts of 500 tokens share the 256 of a step: eight steps until the last of them is computed.
    "long prompts": ({"prompt": [7] * LONG_PROMPT, "max_tokens": FEW}, FEW + PLACES * LONG_PROMPT // STEP_TOKENS + 1),
    "long answers": ({"max_tokens": MODEL_LEN - len(PROMPT)}, MODEL_LEN - len(PROMPT)),
}


@pytest.mark.parametrize(
    "shape",
    ["long prompts", *(pytest.param(shape, marks=pytest.mark.long) for shape in SHAPES if "long p" not in shape)],
)
def test_the_largest_use_of_one_client_delays_anothers_first_token_by_one_turn(frontend: Frontend, shape: str) -> None:
    fields, turn = SHAPES[shape]
    alone, _ = first_token(frontend, "modest")
    with flood(frontend, spare=4, **fields):
        found = [first_token(frontend, "modest") for _ in range(3)]
        own, _ = first_token(frontend, "greedy")
    print(f"{shape}: alone {alone:g} steps, beside it {found} (bound {turn + _SLACK}), its own next {own:g}")
    assert max(count for count, _ in found) <= alone + turn + _SLACK
    assert own > 2 * turn, "the client itself queues behind its own requests"


@pytest.mark.long
def test_priorities_delay_anothers_first_token_by_the_age_cap_and_one_turn(frontend: Frontend) -> None:
    """Where requests carry priorities, who waits for --max-queue-age goes first and takes a later one's place."""
    with flood(frontend, max_tokens=MANY, priority=-(2**31)):
        _, seconds = first_token(frontend, "modest", priority=2**31 - 1)
    with flood(frontend, max_tokens=MANY):
        _, unhurried = first_token(frontend, "modest")
    print(f"{seconds:.2f} s against {unhurried:.2f} s without priorities (age cap {QUEUE_AGE:g} s)")
    assert QUEUE_AGE < seconds <= QUEUE_AGE + 4 * unhurried + 2.0


def test_requests_of_different_clients_reach_the_engine_as_different_flows(engine: Engine, frontend: Frontend) -> None:
    def ask(url: str, address: str, key: str) -> None:
        with httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=_PATIENCE) as client:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            body = {"prompt": [5, 6, 7], "max_tokens": 1}
            client.post(f"{url}/v1/completions", json=body, headers=headers).raise_for_status()

    def entries(index: int) -> np.ndarray:
        region = open_region(engine.region)
        at, count = QueuePairAddresses(region, index), int(region.geometry["sq_entries"])
        found = region.view(SQE, at.sq, count)["flow"].copy()
        tail = int(region.bytes[at.sq_tail : at.sq_tail + 4].view(np.uint32)[0])
        region.close()
        return found[(np.arange(4) + tail - 4) % count]

    frontend.wait_until_idle()
    with _frontend(engine) as keyless:  # which has the second queue pair
        for key, address in itertools.product(("greedy", "modest"), ("127.0.0.1", "127.0.0.2")):
            ask(frontend.url, address, key)
            ask(keyless.url, address, "")
        keyed, unkeyed = entries(0).tolist(), entries(1).tolist()
    assert keyed[0] == keyed[1] != keyed[2] == keyed[3], "one flow for each key, whatever the address"
    assert unkeyed[0] == unkeyed[2] != unkeyed[1] == unkeyed[3], "one flow for each address"
    assert all([*keyed, *unkeyed])
