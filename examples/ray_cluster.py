# SPDX-License-Identifier: Apache-2.0
"""Two engines at one address, by Ray Serve: on this machine, or on the cluster that RAY_ADDRESS names.

    pip install '.[engine,ray]'       # in a checkout, on every node; '.[gpu,ray]' with NVIDIA GPUs
    python examples/ray_cluster.py [PORT]

Each replica is an engine with its frontends. The ingress sends a prompt to the replica that has its prefix cached.
"""

import sys

import httpx
from ray import serve

from blink.ray import app

PORT = int(sys.argv[1]) if len(sys.argv) > 1 else 8000

serve.start(http_options={"port": PORT})
serve.run(
    app(
        {
            "model": "",  # the default one; else a directory or .gguf file that all nodes have
            "name": "smollm2",
            "num_replicas": 2,  # or "autoscaling": {"min_replicas": 1, "max_replicas": 8}
            "num_cpus": 1,  # of each replica; "num_gpus": 1 makes it a GPU engine
            "flags": {"max_model_len": 2048},  # those of `blink serve`
        }
    )
)
with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=300) as http:
    for city in ("Paris", "Rome"):
        body = {"model": "smollm2", "prompt": f"{city} is the capital of", "max_tokens": 4, "temperature": 0}
        answer = http.post("/v1/completions", json=body).raise_for_status().json()
        print(city, "->", answer["choices"][0]["text"])
serve.shutdown()
