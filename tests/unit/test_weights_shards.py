# SPDX-License-Identifier: Apache-2.0
"""Which files a model directory's weights are read from: those inside it, and no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from blink.config import ModelConfig
from blink.errors import ConfigError
from blink.models.weights.loader import load_model
from blink.models.weights.shards import list_shards
from blink.models.weights.text_files import read_json, read_text
from model_mutations import write_directory

INDEX = "model.safetensors.index.json"


def name_shards(directory: Path, *names: object) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": {f"t{i}": name for i, name in enumerate(names)}}))


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/hostname",
        "sub/one.safetensors",
        "..",
        "",
        ".",
        "config.json",
        "a\0.safetensors",
        7,
    ],
)
def test_an_index_names_files_beside_it_only(tmp_path: Path, name: object) -> None:
    model = tmp_path / "model"
    write_directory(model)
    (tmp_path / "outside.safetensors").write_bytes((model / "one.safetensors").read_bytes())
    (model / "sub").mkdir()
    (model / "sub" / "one.safetensors").write_bytes((model / "one.safetensors").read_bytes())
    name_shards(model, "one.safetensors", name)
    with pytest.raises(ConfigError, match=r"index\.json is malformed") as caught:
        list_shards(model)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("has_index", [True, False])
def test_a_link_out_of_the_directory_is_refused(tmp_path: Path, has_index: bool) -> None:
    model = tmp_path / "model"
    write_directory(model)
    (model / "two.safetensors").rename(tmp_path / "two.safetensors")
    (model / "two.safetensors").symlink_to("../two.safetensors")
    if not has_index:
        (model / INDEX).unlink()
    with pytest.raises(ConfigError, match=r"two\.safetensors is a link out of the model's directory"):
        list_shards(model)


def test_a_link_to_itself_counts_as_missing(tmp_path: Path) -> None:
    write_directory(tmp_path)
    (tmp_path / "one.safetensors").unlink()
    (tmp_path / "one.safetensors").symlink_to("one.safetensors")
    with pytest.raises(ConfigError, match=r"lacks one\.safetensors"):
        list_shards(tmp_path)


def test_a_snapshot_of_the_hugging_face_cache_loads_through_its_links(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123abc", tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    write_directory(snapshot)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / f"{number:064x}")
        file.symlink_to(Path("../../blobs") / f"{number:064x}")
    load_model(ModelConfig(model=str(snapshot)), torch.device("cpu"), torch.float32)
    linked = tmp_path / "model"
    linked.symlink_to(snapshot)
    assert [path.name for path in list_shards(linked)] == ["one.safetensors", "two.safetensors"]
    (tmp_path / "x").touch()
    (snapshot / "one.safetensors").unlink()
    (snapshot / "one.safetensors").symlink_to(tmp_path / "x")
    with pytest.raises(ConfigError, match="link out of"):
        list_shards(snapshot)


def test_a_text_of_a_hub_snapshot_is_read_through_its_link_and_one_of_a_linked_folder_is_not(tmp_path: Path) -> None:
    snapshot, blobs, elsewhere = tmp_path / "m" / "snapshots" / "1", tmp_path / "m" / "blobs", tmp_path / "elsewhere"
    for folder in (snapshot / "more", blobs, elsewhere):
        folder.mkdir(parents=True)
    (blobs / "f00").write_text("{}")
    (snapshot / "more" / "a.json").symlink_to("../../../blobs/f00")
    (elsewhere / "b.json").write_text("{}")
    (snapshot / "linked").symlink_to(elsewhere)
    (snapshot / "pipe").symlink_to("/dev/zero")
    assert read_json(snapshot / "more" / "a.json", root=snapshot) == {}
    for path in (snapshot / "linked" / "b.json", snapshot / "pipe"):
        with pytest.raises(ConfigError, match="link out of the model's directory"):
            read_text(path, root=snapshot)
