#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Aider on Blink: it asks for a change of a file, and writes it. It works in a new folder.
#
# blink serve Qwen/Qwen3-Coder-30B-A3B-Instruct       # in another terminal; any model that writes code
# pip install aider-chat
# bash examples/clients/aider_edit.sh
set -euo pipefail
url=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}
model=$(python3 -c "import json, urllib.request as u; print(json.load(u.urlopen('$url/models'))['data'][0]['id'])")
cd "$(mktemp -d)"
echo 'print("Hello")' > greeting.py
aider --model "openai/$model" --openai-api-base "$url" --openai-api-key "${OPENAI_API_KEY:-none}" \
  --no-git --yes-always --no-check-update --no-show-model-warnings --no-analytics --no-pretty --edit-format diff \
  --message 'Let greeting.py say Goodbye.' greeting.py
echo "greeting.py: $(python3 greeting.py)"
