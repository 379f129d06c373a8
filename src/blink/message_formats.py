# SPDX-License-Identifier: Apache-2.0
"""Names of the forms in which models write tool calls and reasoning, for flags."""

from __future__ import annotations

# By vLLM's names, beside auto (blink.text.message.formats).
CALL_FORMATS = (
    "apertus cohere_command3 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 dots functiongemma gemma4 "
    "gigachat3 glm45 glm47 granite granite-20b-fc granite4 hermes hunyuan_a13b hy_v3 hy_v4 inkling internlm jamba "
    "k2_horizon kimi_k2 kimi_k3 lfm2 llama3_json llama4_pythonic longcat mimo minicpm5 minimax minimax_m2 minimax_m3 "
    "mistral olmo3 openai phi4_mini_json plamo3 pythonic qwen3_coder seed_oss step3 step5 xlam"
)
REASONING_FORMATS = (
    "cohere_command3", "deepseek_r1", "deepseek_v4", "ernie45", "gemma4", "glm45", "granite", "granite_thinking_parser",
    "hunyuan_a13b", "hy_v4", "inkling", "k2_horizon", "kimi_k2", "kimi_k3", "minimax_m2_append_think", "minimax_m3",
    "mistral", "nemotron_v3", "openai_gptoss", "plamo3", "qwen3", "seed_oss", "step3p5",
)  # fmt: skip
