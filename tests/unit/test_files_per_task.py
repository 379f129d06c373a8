# SPDX-License-Identifier: Apache-2.0
"""How many files of the product a task touches: counted in what was built.

A task has a regex that only its files have, and lists those that it added.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

_PACKAGE = Path(__file__).resolve().parents[2] / "src" / "blink"
_SUFFIXES = {".py", ".h", ".cuh", ".cu", ".cpp"}
_MARGIN = 2


@dataclass(frozen=True)
class Built:
    """An example of a task: the files that it has changed, and what it has added."""

    task: str
    pattern: str
    most: int  # of changed files, as designed
    added: tuple[str, ...] = ()  # files, each of which is about the task alone
    beyond: int = 0  # changed files beyond the design and its margin: a debt, which may only fall
    since: tuple[str, ...] = ()  # files that later tasks have added, and that know it
    elsewhere: tuple[str, ...] = ()  # folders where the pattern means something else


BUILT = [
    Built("a number format: MXFP4", r"(?i)mxfp4", 2),
    Built("an endpoint: /detokenize", r"DetokenizeBody|answer_detokenize", 1 + 3),
    Built("a model family: Granite", r"    granite,|\"granite\": Family", 1),
    Built("a kernel: 4 bits of prompts", r"INT4_PREFILL|multiply_prompts", 3),
    Built(
        "a recurrent layer: gated delta-net",
        r"(?i)delta.?(net|rule|decode|chunks)|DeltaWeights",
        4,
        (
            "csrc/kernels/recurrent/delta_decode.cu",
            "kernels/cpu/delta_rule.py",
            "kernels/delta_rule.py",
            "kernels/gpu/recurrent/chunks.py",
            "kernels/gpu/recurrent/decode.py",
            "kernels/gpu/recurrent/prefill.py",
            "runner/gpu_recurrences.py",
        ),
        since=(
            "kernels/gpu/recurrent/verify.py",
            "models/mamba.py",
            "models/weights/cuts.py",
            "models/weights/recurrent_loader.py",
        ),
    ),
    Built(
        "rows that verify drafts",
        r"(?i)kVerify|(?<!head_)(?<!Head)draft(?!er|.?head)|spec_tokens",
        6,
        (
            "csrc/kernels/attention/attention_siblings.cuh",
            "csrc/scheduler/answers.h",
            "csrc/scheduler/draft_credit.h",
            "csrc/scheduler/draft_integrity.h",
            "csrc/scheduler/drafts.h",
            "csrc/scheduler/grammar_drafts.h",
            "csrc/scheduler/json_spacing.h",
            "csrc/scheduler/ngram.h",
            "csrc/scheduler/token_index.h",
            "speculation.py",
        ),
        since=(
            "cli/head_fit.py",
            "csrc/scheduler/head_drafts.h",
            "csrc/scheduler/sequence.h",
            "kernels/gpu/recurrent/verify.py",
            "models/mtp_spec.py",
            "runner/drafter.py",
            "runner/eagle.py",
            "runner/layer_drafter.py",
            "runner/mtp.py",
            "view/draft_figures.py",
        ),
        elsewhere=("grammar/", "models/weights/"),  # drafts of JSON Schema; layers that nothing reads
    ),
    Built(
        "a draft head: EAGLE-3",
        r"(?i)eagle|head_?draft|draft.?head|\.drafter|kHead\b",
        12,
        (
            "csrc/scheduler/head_drafts.h",
            "engine/guessing.py",
            "kernels/cpu/guesses.py",
            "kernels/gpu/guesses.py",
            "kernels/guesses.py",
            "models/eagle.py",
            "models/weights/eagle_loader.py",
            "runner/eagle.py",
        ),
        since=(
            "cli/head_fit.py",
            "engine/combinations.py",
            "engine/geometry.py",  # GPUs have graphs with guesses
            "models/mtp_spec.py",
            "models/weights/eagle_config.py",
            "runner/drafter.py",
            "runner/layer_drafter.py",
            "runner/mtp.py",
        ),
    ),
    Built(
        "tensor parallel",
        r"tensor_parallel_size|\bRanks\b|RankLost|PlanWords|all_reduce|ALL_REDUCE|\bCuts\b|class Cut\b",
        6,
        (
            "csrc/kernels/comm/all_reduce.cu",
            "csrc/kernels/comm/two_shot.cu",
            "csrc/kernels/comm_args.h",
            "engine/gpu_group.py",
            "engine/plan_words.py",
            "engine/rank_fit.py",
            "engine/ranks.py",
            "kernels/all_reduce.py",
            "kernels/cpu/all_reduce.py",
            "kernels/gpu/comm/all_reduce.py",
            "kernels/gpu/comm/boxes.py",
            "models/weights/cuts.py",
            "models/weights/rank_matrices.py",
            "models/weights/rank_reader.py",
        ),
        beyond=0,
        since=(
            "adapters/modules.py",
            "csrc/kernels/comm/all_reduce_spread.cu",
            "engine/host_tier.py",
            "kernels/gpu/comm/spread.py",
        ),
    ),
    Built(
        "LoRA adapters",
        r"(?i)\badapters?\b|AdapterId|AdapterWords|AdapterUse|\blora\b",
        7 + 7,  # on a CPU, and on GPUs
        (
            "adapters/__init__.py",
            "adapters/client.py",
            "adapters/expert_modules.py",
            "adapters/fused.py",
            "adapters/gathered.py",
            "adapters/memory.py",
            "adapters/module.py",
            "adapters/modules.py",
            "adapters/peft_config.py",
            "adapters/peft_files.py",
            "adapters/protocol.py",
            "adapters/server.py",
            "api/openai/lora_routes.py",
            "api/serving/adapters.py",
            "csrc/kernels/gemm/gemm_updated.cuh",
            "csrc/kernels/gemm/shrink.cuh",
            "csrc/region/adapter_words.h",
            "csrc/scheduler/adapter_integrity.h",
            "csrc/scheduler/adapter_paging.h",
            "csrc/scheduler/adapter_use.h",
            "csrc/scheduler/adapters.h",
            "engine/adapters.py",
            "engine/gpu_adapters.py",
            "kernels/gpu/lora/__init__.py",
            "kernels/gpu/lora/experts.py",
            "kernels/gpu/lora/few_tokens.py",
            "kernels/gpu/lora/fused.py",
            "kernels/gpu/lora/memory.py",
            "kernels/gpu/lora/stack.py",
            "kernels/gpu/lora/update.py",
            "kernels/gpu/lora/upload.py",
            "kernels/gpu/lora/paging.py",
            "kernels/lora.py",
            "lora_config.py",
            "lora_request.py",
            "region/adapter_words.py",
            "runner/adapters.py",
            "runner/gpu_fused_updates.py",
            "runner/gpu_updates.py",
            "runner/updated_device.py",
        ),
        beyond=0,
        since=(
            "api/openai/ggml_options.py",
            "csrc/scheduler/sequence.h",
            "engine/device_follower.py",
            "engine/ranks.py",
        ),
        elsewhere=("models/families/",),
    ),
    Built(
        "pause, sleep and other weights",
        r"PauseMode|kPaused|pause_begin|ModelControl|model_orders|pause_routes|EngineControls|\.PAUSED|link\.pause",
        10,
        (
            "api/admin/model_routes.py",
            "api/admin/pause_routes.py",
            "api/admin/routes.py",
            "api/admin/tensor_routes.py",
            "csrc/scheduler/pause.h",
            "csrc/scheduler/pause_begin.h",
            "engine/model_control.py",
            "engine/tensor_updates.py",
            "link/pause.py",
            "offline/controls.py",
        ),
        since=("engine/gpu.py", "offline/async_controls.py"),
    ),
    Built("a sampling parameter: min_p", r"\bmin_p\b", 2 + 1),
]


def find_files(pattern: str) -> list[str]:
    """Return the product's files that a regex occurs in."""
    paths = (path for path in _PACKAGE.rglob("*") if path.suffix in _SUFFIXES)
    return sorted(str(path.relative_to(_PACKAGE)) for path in paths if re.search(pattern, path.read_text()))


@pytest.mark.parametrize("built", BUILT, ids=lambda built: built.task)
def test_a_task_touches_few_files(built: Built) -> None:
    found = [name for name in find_files(built.pattern) if not name.startswith(built.elsewhere)]
    assert [name for name in built.added + built.since if name not in found] == []
    changed = [name for name in found if name not in built.added + built.since]
    assert changed
    beyond = max(0, len(changed) - built.most - _MARGIN)
    assert beyond <= built.beyond, changed
    assert beyond == built.beyond, f"It fell: write {beyond} in BUILT."
