# SPDX-License-Identifier: Apache-2.0
"""A small random model of each family, with every option of that family switched on, as transformers makes it."""

from __future__ import annotations

import copy
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from blink import LLM, RequestOutput, SamplingParams
from mxfp4_checkpoints import quantize_model

NUM_NEW = 6
BIAS = "e_score_correction_bias"  # of routers, in most families a buffer
SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 384,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 48,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.8, 2.0, 2.5, 3.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
}
# Models with more than their text, by the text's model_type, and the least of what sees pictures.
WITH_PICTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_vl_text": ("qwen3_vl", VISION),
    "qwen3_vl_moe_text": ("qwen3_vl_moe", VISION),
    "qwen3_5_text": ("qwen3_5", VISION),
    "ministral3": ("mistral3", PIXTRAL),
}
PAIR = ["sliding_attention", "full_attention", "sliding_attention"]
_RECURRENT = {
    "num_hidden_layers": 5,
    "layer_types": [*["linear_attention"] * 3, "full_attention", "linear_attention"],
    "rope_parameters": {**MROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
    "initializer_range": 0.15,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_SHARED = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
_GRANITE = {
    "attention_bias": True,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.5,
}
_GRANITE4 = {
    **_GRANITE,
    "attention_bias": False,
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "shared_intermediate_size": 80,
    "position_embedding_type": "nope",
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_head": 16,
    "mamba_chunk_size": 16,
    "initializer_range": 0.15,
}
_PHI3 = {"model_type": "phi3", "sliding_window": 90, "num_attention_heads": 2, "num_key_value_heads": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-3.1": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    "llama-biased": {"model_type": "llama", "attention_bias": True},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "qwen2-yarn": {"model_type": "qwen2", "rope_parameters": YARN_ROPE},
    "qwen3": {"model_type": "qwen3", "attention_bias": True},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
    },
    "qwen3_moe-plain": {
        "model_type": "qwen3_moe",
        "norm_topk_prob": False,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
    },
    "qwen3_vl": {"model_type": "qwen3_vl_text", "rope_parameters": MROPE, "tie_word_embeddings": True},
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe_text",
        "rope_parameters": MROPE,
        "attention_bias": True,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,  # twice of it is the hidden size: a transposed matrix has the same shape
    },
    "qwen3_next": {
        **_RECURRENT,
        **_SHARED,
        "model_type": "qwen3_next",
        "mlp_only_layers": [1],
    },
    "qwen3_5": {**_RECURRENT, "model_type": "qwen3_5_text", "tie_word_embeddings": True},
    "qwen3_5_moe": {**_RECURRENT, **_SHARED, "model_type": "qwen3_5_moe_text", "attention_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 33},
    "ministral": {"model_type": "ministral", "sliding_window": 50, "layer_types": PAIR},
    "mixtral": {"model_type": "mixtral", "sliding_window": 70, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 48,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "query_pre_attn_scalar": 20,
        "layer_types": PAIR,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "phi3-short": {
        **_PHI3,
        "original_max_position_embeddings": 384,
        "rope_parameters": {**LONG_ROPE, "factor": 4.0},
    },
    "phi3-long": {**_PHI3, "original_max_position_embeddings": 4, "rope_parameters": LONG_ROPE},
    "olmo2": {"model_type": "olmo2", "attention_bias": True},
    "granite": {**_GRANITE, "model_type": "granite"},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "sliding_window": 32,
        "layer_types": PAIR,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {**YARN_ROPE, "truncate": False},
    },
}
_OPT = {"model_type": "opt", "ffn_dim": 80, "init_std": 0.2, "head_dim": None, "num_key_value_heads": None}
FAMILIES |= {
    "opt": _OPT,
    "opt-350m": {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 48},
    "opt-unbiased": {**_OPT, "enable_bias": False, "tie_word_embeddings": False},
}
FAMILIES |= {
    "olmo3": {
        "model_type": "olmo3",
        "sliding_window": 24,
        "layer_types": PAIR,
        "rope_parameters": {
            "full_attention": YARN_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
    },
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 5, "tie_word_embeddings": True},
    "seed_oss": {"model_type": "seed_oss", "rope_theta": 10000.0},
    "ministral3": {
        "model_type": "ministral3",
        "rope_parameters": {
            **YARN_ROPE,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.4,
        },
    },
    "ernie4_5": {"model_type": "ernie4_5", "tie_word_embeddings": True},
    "granite4": {
        **_GRANITE,
        "model_type": "granitemoehybrid",
        "shared_intermediate_size": 80,
        "num_local_experts": 0,
        "layer_types": ["full_attention"] * 3,
        "position_embedding_type": "rope",
    },
    "granite4-hybrid": {
        **_GRANITE4,
        "shared_intermediate_size": 80,
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
    },
    "granite4-hybrid-dense": {**_GRANITE4, "num_local_experts": 0, "mamba_n_groups": 2, "mamba_conv_bias": False},
    "granite4-nope": {
        **_GRANITE,
        "model_type": "granitemoehybrid",
        "shared_intermediate_size": 80,
        "num_local_experts": 0,
        "layer_types": ["full_attention"] * 3,
        "position_embedding_type": "nope",
    },
}
FAMILIES |= {
    "llama4": {
        "model_type": "llama4_text",
        "num_hidden_layers": 5,
        "attention_chunk_size": 48,
        "floor_scale": 32,
        "attn_scale": 0.4,
        "intermediate_size_mlp": 80,
        "intermediate_size": 32,  # twice of it is the hidden size: a transposed matrix has the same shape
        "interleave_moe_layer_step": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "rope_parameters": LLAMA3_ROPE,
    },
}
_GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 24,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 5.0,
}
FAMILIES |= {
    "gemma4": {
        **_GEMMA4,
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 128,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
    "gemma4-moe": {
        **_GEMMA4,
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 32,
    },
    "gemma4-dense": {
        **_GEMMA4,
        "model_type": "gemma4_unified_text",
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
}
# The sizes of heads that are published, of which those of 512 take tiles of their own on a GPU.
WIDE_HEADS = "gemma4-heads"
FAMILIES[WIDE_HEADS] = {
    **FAMILIES["gemma4-dense"],
    "num_attention_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
}
_ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
}
_LATENT = {
    **_ROUTED,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
_SCORES_YARN = {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}
FAMILIES |= {
    "glm4_moe": {
        **_ROUTED,
        "model_type": "glm4_moe",
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "glm4_moe-plain": {**_ROUTED, "model_type": "glm4_moe", "first_k_dense_replace": 0, "norm_topk_prob": False},
    "minimax_m2": {
        "model_type": "minimax_m2",
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "rotary_dim": 16,
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "num_hidden_layers": 4,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 48,
        "moe_layer_interval": 2,
        "tie_word_embeddings": True,
    },
    "glm4_moe_lite": {
        **_LATENT,
        "model_type": "glm4_moe_lite",
        "rms_norm_eps": 1e-2,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "deepseek_v3": {
        **_LATENT,
        "model_type": "deepseek_v3",
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "rope_parameters": _SCORES_YARN,
    },
    "deepseek_v2": {
        **_LATENT,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "rope_parameters": {**_SCORES_YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    },
}
MXFP4 = "gpt_oss-mxfp4"  # its experts rounded
FAMILIES[MXFP4] = FAMILIES["gpt_oss"]


def make_prompts() -> list[list[int]]:
    """Return ten prompts of 5 to 300 tokens, some of which begin alike."""
    rng = random.Random(7)
    longest = [rng.randrange(3, 128) for _ in range(300)]
    prompts = [longest, longest[:150], [*longest[:64], 5, 6], longest[:17]]
    return prompts + [[rng.randrange(3, 128) for _ in range(length)] for length in (5, 7, 16, 40, 100, 220)]


def make_model(values: dict[str, Any]) -> Any:
    """Return a model of transformers; one of a text part is whole, with the least of what sees pictures."""
    values = copy.deepcopy(values)  # for transformers completes what is nested
    if values["model_type"] not in WITH_PICTURES:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), attn_implementation="eager").eval()
    whole, vision = WITH_PICTURES[values["model_type"]]
    ties = values.get("tie_word_embeddings", False)
    config = AutoConfig.for_model(whole, text_config=values, vision_config=vision, tie_word_embeddings=ties)
    return AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()


def count_parameters(model: Any) -> int:
    """Return the number of weights of a model's text part."""
    others = (".visual.", ".vision_tower.", ".multi_modal_projector.")
    weights = [
        *model.named_parameters(),
        *((name, each) for name, each in model.named_buffers() if name.endswith(BIAS)),
    ]
    return sum(weight.numel() for name, weight in weights if not any(one in name for one in others))


def save_model(name: str, path: Path, **changes: Any) -> Any:
    """Write the model of a family as a directory of several shards and return it; changes: of its config."""
    torch.manual_seed(30)
    model = make_model({**SMALL, **FAMILIES[name], **changes})
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight_name.endswith("A_log"):  # as larger ones start, all is forgotten within two tokens
                weight.copy_(2 * torch.rand_like(weight) - 1)
            elif weight.ndim == 1:  # norms start at 0 or 1 and biases at 0, which would hide mistakes
                weight.copy_(torch.rand_like(weight) + 0.5 if "norm" in weight_name else torch.randn_like(weight))
                if name == WIDE_HEADS and weight_name.endswith("q_norm.weight"):
                    weight.mul_(0.1)  # scores of unscaled long vectors would make float32 wrong by 1e-2
            elif "bias" in weight_name or "experts" in weight_name:
                weight.copy_(0.2 * torch.randn_like(weight))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
            elif buffer_name.endswith(BIAS):
                buffer.copy_(0.3 * torch.randn_like(buffer))
    model.save_pretrained(path, max_shard_size="60KB")
    if name == MXFP4:
        quantize_model(model, path)
    return model


@dataclass(frozen=True)
class Found:
    """What Blink made of the prompts."""

    alone: list[list[int]]  # greedy continuations of one after the other
    together: list[list[int]]  # of all at once
    logprobs: list[list[float]]  # of each prompt's tokens but the first


def generate(path: Path, prompts: list[list[int]], device: str, **options: Any) -> Found:
    """Continue prompts greedily: one after the other, then all together, each from chunks.

    Those together find prefixes of the former, and of each other, in the cache; those before are scored. options: of
    LLM.
    """
    plain = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    scored = replace(plain, prompt_logprobs=0)
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 56, "num_gpu_blocks_override": 200}
    options = {"device": device, "dtype": "float32", "skip_tokenizer_init": True} | sizes | options
    with LLM(model=str(path), **options) as llm:
        alone = [llm.generate([prompt], scored, use_tqdm=False)[0] for prompt in prompts]
        together = llm.generate(prompts, plain, use_tqdm=False)
    return Found(
        [output.outputs[0].token_ids for output in alone],
        [output.outputs[0].token_ids for output in together],
        [scores_of(output) for output in alone],
    )


def scores_of(output: RequestOutput) -> list[float]:
    """Return the logprobs of a prompt's tokens but the first."""
    pairs = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
    return [position[token].logprob for token, position in pairs if position is not None]


@torch.inference_mode()
def check(model: Any, prompts: list[list[int]], found: Found) -> None:
    """Compare with transformers: its best token behind each prompt and each token but the last, its logprobs.

    The tokens are its greedy continuation if they are the best ones.
    """
    problems: list[str] = []
    for prompt, tokens, together, logprobs in zip(prompts, found.alone, found.together, found.logprobs, strict=True):
        logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0]
        best = logits[len(prompt) - 1 :].argmax(-1).tolist()
        expected = logits[: len(prompt) - 1].log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        errors = (torch.tensor(logprobs) - expected).abs()
        wrong = (~(errors <= 1e-3 + 1e-3 * expected.abs())).nonzero()[:, 0].tolist()
        if wrong:
            places = f"{len(wrong)} logprobs, the first of token {wrong[0] + 1}"
            problems.append(f"prompt of {len(prompt)} tokens: {places}, by up to {errors.max():.4f}")
        if tokens != best:
            problems.append(f"prompt of {len(prompt)} tokens: continued by {tokens}, not {best}")
        if together != tokens:
            problems.append(f"prompt of {len(prompt)} tokens: continued by {together} in a batch, alone by {tokens}")
    assert not problems, "\n".join(problems)


def change_weights(source: Path, target: Path) -> Path:
    """Copy a model with other weights."""
    shutil.copytree(source, target)
    for path in target.glob("*.safetensors"):
        tensors = {name: tensor.flip(-1).contiguous() for name, tensor in load_file(path).items()}
        save_file(tensors, path)
    return target
