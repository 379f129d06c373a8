# SPDX-License-Identifier: Apache-2.0
"""`blink quickstart`: the first steps, printed or done. README.md and docs/quickstart.md have the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from typing import Final

from blink.config import FrontendConfig
from blink.host.address import Address

_PROBE_INTERVAL: Final = 0.2  # seconds between looks at a server that starts


@dataclass(frozen=True, slots=True)
class Step:
    """One step: what it does, and the code that does it."""

    text: str
    code: str


SERVE: Final = Step(
    "Serve the default model, SmolLM2-135M-Instruct. The first time it is downloaded (94 MB). Ctrl-C stops the server.",
    "blink serve",
)
ASK: Final = Step(
    "Ask it, in another terminal.",
    """curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{
  "model": "SmolLM2-135M-Instruct", "max_tokens": 64,
  "messages": [{"role": "user", "content": "What is the capital of France?"}],
  "stream": true
}'""",
)
GENERATE: Final = Step(
    "Generate in Python, without a server.",
    """from blink import LLM, SamplingParams

with LLM(max_model_len=1024) as llm:
    [result] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
    print(result.outputs[0].text)""",
)
STEPS: Final = (SERVE, ASK, GENERATE)


def run(namespace: Namespace) -> int:
    """Print the steps, or do them; return the exit status."""
    if namespace.run:
        return do_steps(namespace.port)
    for number, step in enumerate(STEPS, 1):
        _show(number, step, namespace.port)
    print("`blink quickstart --run` does all of this here and now.")
    return 0


def do_steps(port: int) -> int:
    """Serve, ask, stop the server, and generate in Python; return the exit status of what failed, or 0."""
    environment = {**os.environ, "no_proxy": FrontendConfig().host}  # no proxy reaches this host's loopback
    _show(1, SERVE, port)
    server = subprocess.Popen([sys.executable, "-m", "blink", "serve", f"--port={port}"])
    try:
        if (status := _await_ready(server, port)) is not None:
            return status
        _show(2, ASK, port)
        if shutil.which("curl") is None:
            print("curl is not installed: this step is left out.")
        elif status := subprocess.run(["sh", "-c", _at(ASK.code, port)], env=environment, check=False).returncode:
            return status
    finally:
        server.terminate()
        server.wait()
    _show(3, GENERATE, port)
    return subprocess.run([sys.executable, "-c", GENERATE.code], check=False).returncode


def _await_ready(server: subprocess.Popen[bytes], port: int) -> int | None:
    """Wait until the server is ready; return its exit status if it ends before."""
    address = Address(host=FrontendConfig().host, port=port, uds="", tls=False)
    while (status := server.poll()) is None and not address.probe():
        time.sleep(_PROBE_INTERVAL)
    return status


def _show(number: int, step: Step, port: int) -> None:
    code = _at(step.code, port)
    if step is SERVE and port != FrontendConfig().port:
        code += f" --port {port}"
    indented = "\n".join(f"    {line}".rstrip() for line in code.splitlines())
    print(f"{number}. {step.text}\n\n{indented}\n", flush=True)


def _at(code: str, port: int) -> str:
    return code.replace(f":{FrontendConfig().port}/", f":{port}/")
