# SPDX-License-Identifier: Apache-2.0
"""Logprobs of prompts' own tokens on the GPU, against transformers on the CPU with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_families import save_model
from prompt_logprobs import check_prompt_logprobs_of_small_steps

pytestmark = pytest.mark.gpu


def test_prompt_logprobs_of_prompts_in_one_small_step_equal_those_of_one_pass(tmp_path: Path) -> None:
    check_prompt_logprobs_of_small_steps(tmp_path, save_model("llama-3.1", tmp_path), 3, "cuda")
