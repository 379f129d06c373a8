#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Claude Code on Blink: it writes a program, runs it and reports. It works in a new folder.
#
# blink serve Qwen/Qwen3-Coder-30B-A3B-Instruct       # in another terminal; any model that was trained to call tools
# npm install --global @anthropic-ai/claude-code
# bash examples/clients/claude_code.sh
set -euo pipefail
url=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}
model=$(node -e "fetch('$url/models').then(r => r.json()).then(list => console.log(list.data[0].id))")
export ANTHROPIC_BASE_URL=${url%/v1} ANTHROPIC_AUTH_TOKEN=${OPENAI_API_KEY:-none}
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 DISABLE_AUTOUPDATER=1
cd "$(mktemp -d)"
claude --model "$model" --permission-mode acceptEdits --allowedTools Read Write Edit Bash \
  --print 'Write sum.py, which prints the sum of 1 to 10. Run it and tell me what it prints.' < /dev/null
echo "sum.py: $(python3 sum.py)"
