# SPDX-License-Identifier: Apache-2.0
"""Open WebUI on Blink, without a browser: its server lists Blink's model and passes chats on.

blink serve                       # in another terminal
pip install open-webui
python examples/clients/open_webui_headless.py
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]

settings = {
    "DATA_DIR": tempfile.mkdtemp(),
    "WEBUI_AUTH": "False",  # one user, without a password: on loopback only
    "WEBUI_SECRET_KEY": "none",
    "ENABLE_OLLAMA_API": "False",
    "OPENAI_API_BASE_URL": os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    "OPENAI_API_KEY": os.environ.get("OPENAI_API_KEY", "none"),
    "OFFLINE_MODE": "True",  # it loads no models of its own
    "RAG_EMBEDDING_ENGINE": "openai",
}
command = [Path(sys.executable).with_name("open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
server = subprocess.Popen(command, env={**os.environ, **settings}, stdout=subprocess.DEVNULL)
http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)
try:
    while server.poll() is None:
        try:
            http.get("/health").raise_for_status()
            break
        except httpx.HTTPError:
            time.sleep(0.5)
    user = http.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
    http.headers["Authorization"] = f"Bearer {user['token']}"
    model = http.get("/api/models").json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    print(http.post("/api/chat/completions", json=body).json()["choices"][0]["message"]["content"])
    lines = http.post("/api/chat/completions", json={**body, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    print("streamed:", "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]))
finally:
    server.terminate()
    server.wait(60)
