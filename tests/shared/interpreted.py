# SPDX-License-Identifier: Apache-2.0
"""Which tests of GPU kernels run in Triton's interpreter too, on the CPU, and how."""

from __future__ import annotations

TESTS = tuple(
    f"tests/gpu/test_{name}.py"
    for name in (
        "activation",
        "attention",
        "delta_rule_gpu",
        "expanded_latents",
        "guesses",
        "gguf_experts",
        "gguf_matmul",
        "host_blocks",
        "invariant_kernels",
        "latent_gpu",
        "layer_inputs",
        "lora_experts",
        "lora_update",
        "mamba_gpu",
        "moe",
        "quantized",
        "recurrent_drafts_gpu",
        "rms_norm",
        "rotary",
        "router_gpu",
        "shared_gate",
        "snapshot_copies",
    )
)
EVERY_CASE = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
# Tests that take the interpreter seconds, of kernels that others run too: only where every case is run.
_LONG = (
    "tests/gpu/test_attention.py::test_heads_larger_than_usual_have_every_option",
    "tests/gpu/test_attention.py::test_tiles_of_long_steps_are_close_to_the_reference_too",
    "tests/gpu/test_attention.py::test_longer_rows_in_a_bucket_of_as_many_rows_as_tokens_are_attended",
    "tests/gpu/test_delta_rule_gpu.py::test_a_prompt_cut_anywhere_leaves_the_same_state",
    "tests/gpu/test_delta_rule_gpu.py::test_rows_of_all_lengths_start_from_their_states",
    "tests/gpu/test_delta_rule_gpu.py::test_one_token_repeated_is_learnt_without_loss",
    "tests/gpu/test_guesses.py::test_a_draft_layer_drafts_on_a_gpu_what_it_does_on_a_cpu",
    "tests/gpu/test_guesses.py::test_a_head_drafts_on_a_gpu_what_it_does_on_a_cpu",
    "tests/gpu/test_expanded_latents.py::test_layers_share_a_plan",
    "tests/gpu/test_expanded_latents.py::test_padding_gives_zeros",
    "tests/gpu/test_expanded_latents.py::test_published_sizes_attend",
    "tests/gpu/test_gguf_experts.py::test_gates_ups_and_downs_may_have_different_formats",
    "tests/gpu/test_invariant_kernels.py::test_a_token_attends_alike_in_any_step",
    "tests/gpu/test_latent_gpu.py::test_padding_gives_zeros",
    "tests/gpu/test_latent_gpu.py::test_published_sizes_attend",
    "tests/gpu/test_mamba_gpu.py::test_rows_of_all_lengths_start_from_their_states",
    "tests/gpu/test_moe.py::test_all_tokens_may_choose_the_same_experts",
)
SOME_CASES = {  # one of each other test
    **EVERY_CASE,
    "BLINK_TEST_CASES": "1",
    "PYTEST_ADDOPTS": " ".join(f"--deselect={test}" for test in _LONG),
}
