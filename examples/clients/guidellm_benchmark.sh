#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GuideLLM on Blink: a benchmark of synthetic prompts. Its argument is the model's directory, or its name on the hub.
#
# blink serve Qwen/Qwen3-0.6B       # in another terminal
# pip install guidellm
# bash examples/clients/guidellm_benchmark.sh Qwen/Qwen3-0.6B
set -euo pipefail
url=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}
report=$(mktemp --suffix .json)
guidellm run --backend "kind=openai_http,target=${url%/v1}" --profile kind=synchronous \
  --constraint kind=max_requests,count=5 --tokenizer "kind=hf_auto,model=$1" \
  --data kind=synthetic_text,prompt_tokens=64,output_tokens=16 \
  --output "kind=json,path=$report" --output kind=console --disable-console-interactive
python3 - "$report" <<'END'
import json, sys
metrics = json.load(open(sys.argv[1]))["benchmarks"][0]["metrics"]
print("requests:", metrics["request_totals"])
END
