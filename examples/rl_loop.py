# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning on a CPU: sample, train with PyTorch, give the engine the new weights, and again.

    python examples/rl_loop.py MODEL_FOLDER [ROUNDS]

MODEL_FOLDER is a checkpoint that transformers reads too. The reward of an answer is its share of even token ids.
docs/pause.md has the endpoints by which a trainer does the same with a server.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM

from blink import LLM, SamplingParams

PROMPT = [5, 6, 7, 8]
SAMPLING = SamplingParams(n=16, max_tokens=16, temperature=1.0, ignore_eos=True)


def reward(answers: torch.Tensor) -> torch.Tensor:
    """Return the share of even ids of each answer [answers, tokens]."""
    return (answers % 2 == 0).float().mean(dim=1)


def train(policy: torch.nn.Module, optimizer: torch.optim.Optimizer, answers: torch.Tensor) -> None:
    """Make answers that are better than the mean more likely (REINFORCE)."""
    prompts = torch.tensor(PROMPT).expand(len(answers), -1)
    logits = policy(torch.cat([prompts, answers], dim=1)).logits[:, len(PROMPT) - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(-1, answers[..., None]).sum(dim=(1, 2))
    gains = reward(answers)
    loss = -((gains - gains.mean()) * logprobs).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def main(folder: str, rounds: int) -> None:
    """Train for some rounds, and print the mean reward of each."""
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    options = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}
    with LLM(folder, **options) as llm:
        for number in range(rounds):
            (output,) = llm.generate([{"prompt_token_ids": PROMPT}], SAMPLING, use_tqdm=False)
            answers = torch.tensor([list(one.token_ids) for one in output.outputs])
            print(f"round {number}: mean reward {reward(answers).mean():.2f}", flush=True)
            train(policy, optimizer, answers)
            llm.update_weights_from_tensor(policy.state_dict())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)
