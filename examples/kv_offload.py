# SPDX-License-Identifier: Apache-2.0
"""Documents that take turns in a small KV cache: host memory keeps those that it evicts.

    pip install '.[engine]'           # in a checkout
    python examples/kv_offload.py [MODEL]

MODEL is a directory or a .gguf file. Without it, SmolLM2-135M-Instruct is used. docs/kv-offload.md says what happens.
"""

import sys
import time

from blink import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else ""
# Each takes about 500 tokens, and the KV cache has room for 640.
DOCUMENTS = [
    " ".join(f"In {town}, house {number} has {number + 3} windows." for number in range(1, 41))
    for town in ("Oslo", "Lima", "Kyoto")
]
SAMPLING = SamplingParams(temperature=0, max_tokens=4)


def ask(title: str, **options: float) -> list[str]:
    """Ask about each document twice, in turns; print what was cached the second time, and how long it took."""
    with LLM(MODEL, device="cpu", max_model_len=640, num_gpu_blocks_override=40, **options) as llm:
        start, answers, cached = 0.0, list[str](), 0
        for turn in range(2):
            start, answers, cached = time.perf_counter(), [], 0
            for number, document in enumerate(DOCUMENTS):
                question = f"{document} House {turn + number + 2} has"
                (output,) = llm.generate([question], SAMPLING, use_tqdm=False)
                cached += output.num_cached_tokens or 0
                answers.append(output.outputs[0].text)
        print(f"{title}: {cached} prompt tokens were cached, {time.perf_counter() - start:.2f} s")
    return answers


without = ask("without host memory")
with_host = ask("with host memory", kv_offloading_size=0.25)
print("the answers are equal" if with_host == without else "the answers differ")
