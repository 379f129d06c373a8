#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GuideLLM on Blink: a benchmark of synthetic prompts. Its first argument is the model's directory or name on the hub.
#
# blink serve Qwen/Qwen3-0.6B       # in another terminal
# pip install guidellm
# bash examples/clients/guidellm_benchmark.sh Qwen/Qwen3-0.6B
set -euo pipefail
url=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}
guidellm benchmark --target "${url%/v1}" --profile synchronous --max-requests 5 --processor "$1" \
  --data 'prompt_tokens=64,output_tokens=16' --output-path report.json
