# SPDX-License-Identifier: Apache-2.0
"""An engine with the default model, a frontend by RDMA and one by shared memory, and what they answer.

All of it goes on while other tests run: in the rig the model takes a second for a token.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rdma_processes import HttpFrontend, ModelEngine, free_port, wait_for

QUESTIONS = ("Hello", "The capital of France is")
_MAX_TOKENS = 4


class ModelServers:
    """Own the three processes; ask the questions as soon as they are ready."""

    def __init__(self, folder: Path) -> None:
        template = folder / "template"
        template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
        chat = f"--chat-template={template}"  # the model's own would make the prompts four times as long
        place, region = f"127.0.0.1:{free_port()}", "model"
        self._engine = ModelEngine(region, place)
        self._frontends = {
            "rdma": HttpFrontend(f"--rdma={place}", "--region=model-rdma", chat),
            "shm": HttpFrontend(f"--region={region}", chat),
        }
        self._pool = ThreadPoolExecutor(len(QUESTIONS) * len(self._frontends) + 1)
        self._answers = self._pool.submit(self._ask_all)

    def answers(self) -> dict[tuple[str, str], list[int]]:
        """Return the tokens of each answer, by way and question."""
        return self._answers.result()

    def kill(self) -> None:
        """End the processes."""
        for frontend in self._frontends.values():
            frontend.stop()
        self._engine.kill()
        self._pool.shutdown()

    def _ask_all(self) -> dict[tuple[str, str], list[int]]:
        wait_for(self._are_healthy, "the default model", pause=2)
        asked: dict[tuple[str, str], Future[list[int]]] = {
            (way, question): self._pool.submit(self._ask, way, question)
            for way in self._frontends
            for question in QUESTIONS
        }
        return {key: answer.result() for key, answer in asked.items()}

    def _ask(self, way: str, question: str) -> list[int]:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": _MAX_TOKENS, "temperature": 0}
        status, answer = self._frontends[way].request(
            "POST", "/v1/chat/completions", {**body, "return_token_ids": True}
        )
        assert status == 200, answer
        choice = answer["choices"][0]
        return choice["token_ids"]

    def _are_healthy(self) -> bool:
        assert self._engine.process.poll() is None, "the engine died"
        return all(frontend.is_healthy() for frontend in self._frontends.values())
