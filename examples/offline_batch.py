# SPDX-License-Identifier: Apache-2.0
"""Many prompts at once, without a server: the engine runs in this process.

    pip install '.[engine]'           # in a checkout; '.[gpu]' with an NVIDIA GPU
    python examples/offline_batch.py [MODEL] > answers.jsonl

MODEL is a name on the Hugging Face hub, a directory or a .gguf file. Without it, SmolLM2-135M-Instruct is used.
"""

import json
import sys

from blink import LLM, SamplingParams

COUNTRIES = ["France", "Japan", "Kenya", "Peru", "Norway", "Egypt", "Canada", "India"]

prompts = [f"The capital of {country} is" for country in COUNTRIES]
# One object for all prompts, or a list with one for each.
params = SamplingParams(temperature=0, max_tokens=8, stop=["."])

# Leaving the block stops the engine and frees its memory.
with LLM(sys.argv[1] if len(sys.argv) > 1 else "", max_model_len=1024) as llm:
    # Hand over all prompts in one call: the scheduler batches them, and those that do not fit wait.
    for result in llm.generate(prompts, params):
        output = result.outputs[0]
        line = {"prompt": result.prompt, "text": output.text, "finish_reason": output.finish_reason}
        print(json.dumps(line, ensure_ascii=False))
