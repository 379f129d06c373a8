# SPDX-License-Identifier: Apache-2.0
"""How many tokens a step gives with a draft head, and that the answers stay the same.

    pip install '.[engine]'           # in a checkout
    python examples/draft_head.py MODEL [HEAD]

MODEL is a directory or a .gguf file. HEAD is the directory of an EAGLE-3 head that was trained for this model. Without
a head the model's own draft layer (MTP) drafts, as Qwen3-Next and Qwen 3.5 have one.
"""

import json
import sys

from blink import LLM, SamplingParams

PROMPTS = ["Tell me how bread is made.", "Write a Python function that adds two numbers.", "Why is the sky blue?"]

model, *heads = sys.argv[1:]
params = SamplingParams(temperature=0, max_tokens=128)
method = {"method": "eagle3", "model": heads[0]} if heads else {"method": "mtp"}
speculative = json.dumps(method | {"num_speculative_tokens": 3})
answers = []
for config in ("", speculative):
    with LLM(model, max_model_len=1024, speculative_config=config) as llm:
        # One prompt after the other: a step then gives tokens of one answer alone.
        outputs = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0] for prompt in PROMPTS]
        stats = llm.stats()
    tokens = sum(len(output.token_ids) for output in outputs)
    answers.append([output.text for output in outputs])
    name = "with the head" if config else "without"
    print(f"{name}: {tokens} tokens in {stats['num_steps']} steps; {stats['accepted_tokens']} drafted tokens accepted")
print("the answers are equal" if answers[0] == answers[1] else "the answers differ: compare the last bits of logits")
