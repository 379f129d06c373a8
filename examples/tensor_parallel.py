# SPDX-License-Identifier: Apache-2.0
"""One model that several ranks share, without a server: the answers are those of one rank.

    pip install '.[engine]'           # in a checkout
    python examples/tensor_parallel.py [RANKS [MODEL [ADAPTER]]]

Ranks are threads of the CPU engine: this shows how sharding works and makes nothing faster. Without MODEL,
SmolLM2-135M-Instruct is used. Its 9 query heads and 3 key-value heads can be shared by 3 ranks. ADAPTER is the folder
of a LoRA adapter, of which each rank has the part that its part of the model needs.
"""

import sys

from blink import LLM, LoRARequest, SamplingParams

RANKS = int(sys.argv[1]) if len(sys.argv) > 1 else 3
MODEL = sys.argv[2] if len(sys.argv) > 2 else ""
ADAPTER = LoRARequest("adapter", 1, sys.argv[3]) if len(sys.argv) > 3 else None
PROMPTS = ["The capital of France is", "Two and two is", "The first month of the year is"]


def answer(ranks: int) -> list[str]:
    """Return the continuations that a number of ranks compute together."""
    params = SamplingParams(temperature=0, max_tokens=8)
    # A size that does not divide the model is refused, with those that do.
    options = {"tensor_parallel_size": ranks, "enable_lora": ADAPTER is not None, "max_model_len": 512}
    with LLM(MODEL, device="cpu", **options) as llm:
        results = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=ADAPTER)
        return [result.outputs[0].text for result in results]


for prompt, alone, shared in zip(PROMPTS, answer(1), answer(RANKS), strict=True):
    print(f"{prompt}{shared!r}, {'as' if shared == alone else 'not as'} one rank")
