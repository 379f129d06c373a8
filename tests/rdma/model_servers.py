# SPDX-License-Identifier: Apache-2.0
"""An engine with a model, a frontend by RDMA and one by shared memory, and what they answer.

All of it goes on while other tests run: in the rig to load torch takes minutes, and the default model a second a token.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ports import free_port
from rdma_processes import HttpFrontend, ModelEngine, wait_for
from tiny_model import write_tiny_model

_PATIENT = ("--engine-timeout=300",)  # the engine is slow, not gone


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, and what is asked of it."""

    name: str
    engine_flags: tuple[str, ...]
    frontend_flags: tuple[str, ...]
    path: str
    questions: tuple[dict[str, Any], ...]


def tiny_model(folder: Path) -> ServedModel:
    """Describe a small model with random weights, which is asked with token ids."""
    flags = (str(write_tiny_model(folder)), "--load-format=dummy", "--skip-tokenizer-init")
    prompts = [[7, 11, 13], [500, 3, *range(100, 170), 9]]
    questions = tuple({"prompt": prompt, "max_tokens": 24, "ignore_eos": True} for prompt in prompts)
    return ServedModel("tiny", flags, flags, "/v1/completions", questions)


def default_model(folder: Path) -> ServedModel:
    """Describe the default model, which is asked in words."""
    template = folder / "template"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    flags = (f"--chat-template={template}",)  # the model's own would make the prompts four times as long
    texts = ("Hello", "The capital of France is")
    questions = tuple({"messages": [{"role": "user", "content": text}], "max_tokens": 4} for text in texts)
    return ServedModel("default", (), flags, "/v1/chat/completions", questions)


class ModelServers:
    """Own the three processes; ask the questions as soon as they are ready."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        place, region = f"127.0.0.1:{free_port()}", f"model-{model.name}"
        self._engine = ModelEngine(region, place, *model.engine_flags)
        self._frontends = {
            "rdma": HttpFrontend(f"--rdma={place}", f"--region={region}-rdma", *_PATIENT, *model.frontend_flags),
            "shm": HttpFrontend(f"--region={region}", *_PATIENT, *model.frontend_flags),
        }
        self._pool = ThreadPoolExecutor(len(model.questions) * len(self._frontends) + 1)
        self._answers = self._pool.submit(self._ask_all)

    def answers(self) -> dict[str, list[list[int]]]:
        """Return the tokens of the answers to all questions, by way."""
        return self._answers.result()

    def kill(self) -> None:
        """End the processes."""
        for frontend in self._frontends.values():
            frontend.kill()
        self._engine.kill()
        self._pool.shutdown()

    def _ask_all(self) -> dict[str, list[list[int]]]:
        wait_for(self._are_healthy, f"the {self._model.name} model", pause=2)
        asked: dict[str, list[Future[list[int]]]] = {
            way: [self._pool.submit(self._ask, way, question) for question in self._model.questions]
            for way in self._frontends
        }
        return {way: [answer.result() for answer in answers] for way, answers in asked.items()}

    def _ask(self, way: str, question: dict[str, Any]) -> list[int]:
        body = {**question, "temperature": 0, "return_token_ids": True}
        status, answer = self._frontends[way].request("POST", self._model.path, body)
        assert status == 200, answer
        return answer["choices"][0]["token_ids"]

    def _are_healthy(self) -> bool:
        self._engine.check_lives()
        return all(frontend.is_healthy() for frontend in self._frontends.values())
