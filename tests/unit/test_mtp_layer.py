# SPDX-License-Identifier: Apache-2.0
"""Layers that predict one token further: what they draft is what a plain computation over the whole text gives."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_eagle_head import BLOCK, DRAFTS, TEXT, Play
from torch import Tensor

from blink.config import EngineConfig, ModelConfig
from blink.engine.same_model import open_same_model
from blink.errors import ConfigError
from blink.kernels.batch import Batch, Param
from blink.models.decoder import Decoder
from blink.models.weights.mtp_loader import load_mtp
from blink.models.weights.source import read_spec
from blink.runner.mtp import MtpDrafter
from blink.runner.run import Runner
from blink.speculation import check_on_gpu, read_speculation
from model_driver import load
from model_families import save_model
from mtp_layers import MtpReference, add_mtp, draw_mtp, read_tensors, read_text_config
from tiny_model import write_tiny_model

OPTIONS: dict[str, Any] = {"max_model_len": 64, "dtype": "float32"}


class MtpPlay(Play):
    """Sequences of a model whose own layer drafts; changes: of the model's options."""

    def __init__(self, path: Path, **changes: Any) -> None:
        options = OPTIONS | changes
        self.target = load(path, **options)
        head = load_mtp(ModelConfig(model=str(path), **options), self.target)
        self.target.add_head(head)
        self.runner = Runner(self.target)
        self.drafter = self.runner.drafter = MtpDrafter(self.target, head, DRAFTS)
        sizes: dict[str, Any] = {"max_tokens": 64, "max_rows": 16, "num_slots": 3, "max_blocks": 8, "max_model_len": 64}
        self.batch = Batch.allocate(**sizes, has_draft_head=True, most_siblings=DRAFTS)
        self.target.keep_rollback(DRAFTS)
        self.cache = self.target.allocate_kv_cache(24, BLOCK, 3)
        self.batch.block_tables[:] = torch.randperm(24, generator=torch.Generator().manual_seed(1)).view(3, 8)
        self.residuals = {}
        self._keep, self.drafter.keep = self.drafter.keep, self.keep

    def ends(self, slot: int, length: int) -> Tensor:
        """Return what the model's last layer ended with at a slot's first positions [length, hidden]."""
        kept = [self.residuals[slot, position] for position in range(length)]
        return torch.stack([each[self.target.spec.num_layers] for each in kept])


@dataclass
class Made:
    """A model with such a layer, and the plain computation of that."""

    path: Path
    reference: MtpReference

    def check(self, play: MtpPlay, slot: int, text: list[int]) -> None:
        """Compare the draft behind a text."""
        hidden = self.reference.norm(play.ends(slot, len(text) - 1), "model.norm")
        assert play.draft(slot) == (len(text), self.reference.draft(hidden, text, DRAFTS))


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    path = tmp_path_factory.mktemp(request.param)
    save_model(request.param, path)
    add_mtp(path, draw_mtp(path, seed=12))
    return Made(path, MtpReference(read_text_config(path), read_tensors(path)))


def test_what_an_engine_keeps_besides_makes_no_other_model(made: Made) -> None:
    model = MtpPlay(made.path).target
    model.spec = replace(model.spec, spare_blocks=3)  # as a GPU's draft head has them
    config = ModelConfig(model=str(made.path), **OPTIONS)
    assert open_same_model(model, config, []).spec == model.spec.as_stored != model.spec
    model.spec = replace(model.spec, vocab_size=7)
    with pytest.raises(ConfigError, match="another model"):
        open_same_model(model, config, [])


@pytest.mark.parametrize("chunk", [20, 7, 1])
def test_a_draft_is_that_of_the_plain_computation(made: Made, chunk: int) -> None:
    play = MtpPlay(made.path)
    play.begin(0, TEXT)
    sampled = [0]
    for start in range(0, len(TEXT), chunk):
        sampled = play.step((0, start, TEXT[start : start + chunk]))
    text = [*TEXT, *sampled]
    made.check(play, 0, text)
    for _ in range(9):  # over a block's border
        text += play.step((0, len(text) - 1, text[-1:]))
        made.check(play, 0, text)


def test_rows_that_verify_drafts_and_other_sequences_are_read_as_plain_decoding(made: Made) -> None:
    """In one step a draft of which one token is right, and another sequence's prompt; then the text goes on."""
    alone = MtpPlay(made.path)
    alone.begin(1, TEXT)
    known = [*TEXT, *alone.step((1, 0, TEXT))]
    for _ in range(3):
        known += alone.step((1, len(known) - 1, known[-1:]))
    play = MtpPlay(made.path)
    play.begin(1, TEXT)
    text = [*TEXT, *play.step((1, 0, TEXT))]
    play.begin(2, TEXT[:6])
    at, right = len(text), known[len(text)]
    sampled = play.step(
        (1, at - 1, text[-1:]), (1, at, [right]), (1, at + 1, [(known[at + 1] + 1) % 128]), (2, 0, TEXT[:6])
    )
    assert sampled[:2] == known[at : at + 2]
    text += sampled[:2]
    made.check(play, 1, text)
    made.check(play, 2, [*TEXT[:6], sampled[3]])
    play.batch.state_lags[0] = 1
    text += play.step((1, len(text) - 1, text[-1:]))
    assert text == known[: len(text)]
    made.check(play, 1, text)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_sequences_of_different_lengths_are_drafted_for_as_alone(made: Made, kv_cache_dtype: str) -> None:
    prompts = {0: TEXT, 1: TEXT[3:9], 2: TEXT[5:18]}
    together, drafts = MtpPlay(made.path, kv_cache_dtype=kv_cache_dtype), list[Any]()
    for slot, prompt in prompts.items():
        together.begin(slot, prompt)
    together.step(*((slot, 0, prompt) for slot, prompt in prompts.items()))
    for slot, prompt in prompts.items():
        alone = MtpPlay(made.path, kv_cache_dtype=kv_cache_dtype)
        alone.begin(slot, prompt)
        alone.step((slot, 0, prompt))
        assert together.draft(slot) == alone.draft(slot)
        drafts.append(together.draft(slot))
    assert [length for length, _ in drafts] == [1 + len(prompt) for prompt in prompts.values()]
    assert {len(tokens) for _, tokens in drafts} == {DRAFTS}


def test_a_prompt_that_goes_on_has_no_draft_yet(made: Made) -> None:
    play = MtpPlay(made.path)
    play.begin(0, TEXT)
    play.step((0, 0, TEXT[:9]))
    assert play.draft(0) == (0, []) and int(play.batch.params[0, Param.NUM_PROMPT_TOKENS]) == len(TEXT)


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "layers.0.self_attn.q_proj.weight"])
def test_a_tensor_that_is_missing_is_named(made: Made, tmp_path: Path, name: str) -> None:
    path, target = _copy(made, tmp_path, lambda tensors: tensors.pop(f"mtp.{name}"))
    with pytest.raises(ConfigError, match=f"no tensor 'mtp.{name}'"):
        load_mtp(ModelConfig(model=str(path), **OPTIONS), target)


@pytest.mark.parametrize("name", ["fc.weight", "pre_fc_norm_embedding.weight", "layers.0.self_attn.k_norm.weight"])
def test_a_tensor_of_another_shape_is_named(made: Made, tmp_path: Path, name: str) -> None:
    path, target = _copy(made, tmp_path, lambda tensors: tensors.update({f"mtp.{name}": torch.zeros(3)}))
    with pytest.raises(ConfigError, match=f"mtp.{name}' has shape"):
        load_mtp(ModelConfig(model=str(path), **OPTIONS), target)


def _copy(made: Made, folder: Path, change: Any) -> tuple[Path, Decoder]:
    """Write the same model with another layer; return it, and the model."""
    target = load(made.path, **OPTIONS)
    for file in made.path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "mtp.safetensors")
    change(tensors)
    save_file(tensors, folder / "mtp.safetensors")
    return folder, target


def test_files_without_the_layer_are_refused(tmp_path: Path) -> None:
    save_model("qwen3_5", tmp_path)
    with pytest.raises(ConfigError, match=r"has no draft layer \(MTP\): use ngram"):
        load_mtp(ModelConfig(model=str(tmp_path), **OPTIONS), load(tmp_path, **OPTIONS))


def test_families_without_the_layer_are_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, vocab_size=128)
    target = load(path, load_format="dummy", **OPTIONS)
    with pytest.raises(ConfigError, match=r"no draft layer \(MTP\) of llama"):
        load_mtp(ModelConfig(model=str(path), load_format="dummy", **OPTIONS), target)


@pytest.mark.parametrize("method", ["mtp", "qwen3_next_mtp", "qwen3_5_mtp"])
def test_the_names_of_vllm_ask_for_it(method: str) -> None:
    found = EngineConfig(speculative_config=json.dumps({"method": method})).speculation
    assert (found.mtp, found.head, found.num_tokens, found.has_head) == (True, "", 1, True)
    assert found.ngram_min > found.ngram_max and found.sizes(64, 9, knows_bytes=False)["has_draft_head"]


def test_one_gpu_takes_it() -> None:
    asked = read_speculation({"method": "mtp"})
    model = read_spec(Path(__file__).parents[2] / "benchmarks" / "configs" / "qwen3.6-27b")
    check_on_gpu(asked, model, 1)
    with pytest.raises(ConfigError, match="recurrent layers on several GPUs"):
        check_on_gpu(asked, model, 2)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"method": "mtp", "model": "x"}, "no 'model' with mtp"),
        ({"method": "mtp", "num_speculative_tokens": 16}, "between 1 and 15"),
        ({"method": "deepseek_mtp"}, "deepseek_mtp.*not yet"),
    ],
)
def test_what_is_not_done_is_refused_by_name(values: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_speculation(values)


def test_newer_weights_fit_a_model_whose_head_has_blocks_for_guesses(made: Made) -> None:
    config, target = ModelConfig(model=str(made.path), **OPTIONS), load(made.path, **OPTIONS)
    target.add_head(load_mtp(config, target), spare_blocks=32)
    open_same_model(target, config, ()).check_over(target)


def test_guesses_beyond_the_longest_text_are_made_and_harm_nothing(made: Made) -> None:
    """The last places of a text of 64 tokens, which steps that are timed at boot have."""
    play, text = MtpPlay(made.path), (TEXT * 4)[:62]
    play.begin(0, text)
    sampled = play.step((0, 0, text))
    assert play.draft(0)[0] == 63 and len(play.draft(0)[1]) == DRAFTS
    play.step((0, 62, sampled))
    assert play.draft(0)[0] == 64
