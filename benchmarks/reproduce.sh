#!/usr/bin/env bash
# Measure an engine on one GPU as benchmarks/results has it: benchmarks/reproduce.sh [PART...]
#
#   http        a server of Llama-3-8B's shape under the load of docs/benchmarking.md, three times
#   burst       the same with 1,200 requests at once, by how many sequences and tokens a step may have
#   decode      time per output token of all models in 16 bits, and from the end of a step to the next launch
#   quantized   the same in FP8; steps in 8 and 4 bits
#   classes     urgent requests beside a flood, by the target of their pace
#   first       the parts of the time to the first token, on an idle server and beside 32 sequences
#   idle        power of a server without requests, by the scheduler's pause
#   pacing      joules per token by the target of time per output token, three times
#   energy      joules of a step at fixed rows, and where they go
#   attention   attention of decoding rows and of prompts, beside cuDNN's
#   steps       where the time of single steps goes
#
# Without PART all of them. PYTHON names the interpreter (python3), CONFIGS the folder of the models' shapes.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} CONFIGS=${CONFIGS:-src/blink/models/configs} RESULTS=$(mktemp -d)
LAST=$(($(nproc) - 1)) # the client gets the last four cores, the server the others
SERVER_CPUS=0-$((LAST > 4 ? LAST - 4 : LAST)) CLIENT_CPUS=$((LAST > 4 ? LAST - 3 : 0))-$LAST PORT=${PORT:-8100}

bench() { "$PYTHON" -m blink bench --port "$PORT" --client-cpus "$CLIENT_CPUS" "$@" 2>>"$RESULTS/bench.log"; }

# Start a server of Llama-3-8B's shape with more options; stop it with stop_server.
serve() {
  taskset -c "$SERVER_CPUS" "$PYTHON" -m blink serve $CONFIGS/llama-3-8b --load-format dummy --dtype bfloat16 \
    --skip-tokenizer-init --no-enable-prefix-caching --host 127.0.0.1 --port "$PORT" "$@" >"$RESULTS/serve.log" 2>&1 &
  SERVER=$!
  trap 'kill -INT $SERVER' EXIT
  until "$PYTHON" -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$PORT/health')" 2>/dev/null; do
    kill -0 $SERVER || { tail "$RESULTS/serve.log"; exit 1; }
    sleep 0.5
  done
}

stop_server() {
  kill -INT $SERVER
  wait $SERVER || true
  trap - EXIT
}

trace_burst() {
  "$PYTHON" benchmarks/trace_steps.py "$PYTHON" -m blink bench --port "$PORT" --client-cpus "$CLIENT_CPUS" \
    --request-rate inf --num-prompts 1200
}

http() {
  serve --max-num-seqs 256
  for run in 1 2 3; do
    bench --request-rate 0.5,8,32,48 --duration 12 --result-dir "$RESULTS" --result-filename "$run.json" | tail -n 5
  done
  trace_burst
  stop_server
}

burst() {
  for size in "512 2048" "1024 2048" "1280 8192"; do
    echo "--max-num-seqs ${size% *} --max-num-batched-tokens ${size#* }"
    serve --max-num-seqs "${size% *}" --max-num-batched-tokens "${size#* }"
    trace_burst
    stop_server
  done
}

decode() {
  "$PYTHON" benchmarks/gpu_decode.py $CONFIGS/llama-3-8b --prompt-tokens 300
  "$PYTHON" benchmarks/gpu_decode.py $CONFIGS/qwen3-30b-a3b --prompt-tokens 300
  "$PYTHON" benchmarks/gpu_decode.py $CONFIGS/phi-4 --rows 1 32
  "$PYTHON" benchmarks/gpu_decode.py $CONFIGS/qwen3-32b --rows 1 32
  "$PYTHON" benchmarks/step_gaps.py --rows 1 64 256 --new-tokens 300 --rate 160
}

quantized() {
  for model in llama-3-8b qwen3-32b qwen3-30b-a3b; do
    "$PYTHON" benchmarks/gpu_decode.py $CONFIGS/$model --quantization fp8 --rows 1 8 32
  done
  "$PYTHON" benchmarks/kernels/quantized_step.py --rows 1 8 32 --prompts 128 512 2048
}

classes() {
  for target in 0 5 8 12; do
    echo "--urgent-tpot-target-ms $target"
    "$PYTHON" benchmarks/two_classes.py $CONFIGS/qwen3-30b-a3b --seconds 6 --repeats 3 --runs flex \
      --urgent-tpot-target-ms $target | tail -n 2
  done
  "$PYTHON" benchmarks/two_classes.py $CONFIGS/llama-3-8b --seconds 8 --repeats 3 | tail -n 4
}

first() {
  "$PYTHON" benchmarks/first_token.py $CONFIGS/llama-3-8b --device cuda
  "$PYTHON" benchmarks/first_token.py $CONFIGS/llama-3-8b --device cuda --beside 32
}

idle() { "$PYTHON" benchmarks/idle_power.py $CONFIGS/llama-3-8b; }

pacing() { "$PYTHON" benchmarks/pacing.py $CONFIGS/llama-3-8b --repeats 3; }

energy() { "$PYTHON" benchmarks/step_energy.py $CONFIGS/llama-3-8b; }

attention() { "$PYTHON" benchmarks/kernels/attention.py; }

steps() {
  "$PYTHON" benchmarks/kernels/profile_step.py --rows 1 8 32 64 --prompts 128 256 512
  "$PYTHON" benchmarks/kernels/profile_step.py --model qwen3-30b-a3b --formats bf16 fp8 --rows 1 8 32
}

echo "logs: $RESULTS"
export PYTHONPATH=src:benchmarks:benchmarks/kernels:${PYTHONPATH:-}
for part in "${@:-http burst decode quantized classes first idle pacing energy attention steps}"; do
  for name in $part; do
    echo "== $name"
    "$name"
  done
done
