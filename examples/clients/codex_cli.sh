#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Codex CLI on Blink: it writes a program, runs it and reports. It works in a new folder, without a sandbox.
#
# blink serve Qwen/Qwen3-Coder-30B-A3B-Instruct       # in another terminal; any model that was trained to call tools
# npm install --global @openai/codex
# bash examples/clients/codex_cli.sh
set -euo pipefail
url=${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}
model=$(node -e "fetch('$url/models').then(r => r.json()).then(list => console.log(list.data[0].id))")
CODEX_HOME=$(mktemp -d)
export CODEX_HOME
cat > "$CODEX_HOME/config.toml" <<END
model = "$model"
model_provider = "blink"
model_context_window = 32768

[model_providers.blink]
name = "Blink"
base_url = "$url"
wire_api = "responses"
END
cd "$(mktemp -d)"
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox \
  'Write squares.py, which prints the squares of 1 to 3. Run it and tell me what it prints.' < /dev/null
echo "squares.py: $(python3 squares.py)"
