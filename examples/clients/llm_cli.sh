#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The command llm on Blink: a stream, a whole answer, a schema, a tool and a conversation.
#
# blink serve Qwen/Qwen3-0.6B       # in another terminal; any model that was trained to call tools
# pip install llm
# bash examples/clients/llm_cli.sh
set -euo pipefail
url=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}
model=$(python3 -c "import json, urllib.request as u; print(json.load(u.urlopen('$url/models'))['data'][0]['id'])")
export OPENAI_API_KEY=${OPENAI_API_KEY:-none}
LLM_USER_PATH=$(mktemp -d)
export LLM_USER_PATH
cat > "$LLM_USER_PATH/extra-openai-models.yaml" <<END
- model_id: blink
  model_name: $model
  api_base: $url
  supports_schema: true
  supports_tools: true
END

llm -m blink 'What is the capital of France?'
echo "whole: $(llm -m blink --no-stream 'What is the capital of France?')"
llm -m blink --schema 'name, age int' 'Describe Anna.'
llm -m blink 'How is the weather in Rome?' --functions '
def forecast(city: str) -> str:
    "Tell the weather in a city."
    return city + ": sunny, 27 degrees"
'
llm -m blink --continue 'And how many inhabitants has it?'
