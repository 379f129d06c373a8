# SPDX-License-Identifier: Apache-2.0
"""Models of the hub: what is downloaded, what is refused, and that nothing is written outside of the cache."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, constants, hf_hub_download

from blink.cli.doctor import examine_given_model
from blink.cli.main import main
from blink.cli.plan import PlanConfig
from blink.config import ModelConfig
from blink.errors import ConfigError
from blink.hub.client import Hub
from blink.hub.fetch import find_cached
from blink.hub.localize import localize
from blink.hub.name import HubName, parse_name
from blink.hub.selection import choose_gguf
from stub_hub import REVISIONS, Repository, StubHub, serve_hub

_SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
_INDEX = json.dumps({"weight_map": dict(zip("ab", _SHARDS, strict=True))}).encode()
_CONFIG = b'{"model_type": "llama"}'


@pytest.fixture(scope="module")
def running_hub() -> Iterator[StubHub]:
    with serve_hub() as hub:
        yield hub


@pytest.fixture
def hub(running_hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> StubHub:
    running_hub.repositories.clear()
    running_hub.asked.clear()
    monkeypatch.setenv("HF_ENDPOINT", running_hub.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return running_hub


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def resolve(folder: Path, model: str = "acme/one", **options: Any) -> ModelConfig:
    return localize(ModelConfig(model=model, download_dir=str(folder), **options))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-8B", HubName("Qwen/Qwen3-8B")),
        ("a/b@v1.2", HubName("a/b", "v1.2")),
        ("hf://a/b:Q8_0", HubName("a/b", "", "Q8_0")),
        ("https://huggingface.co/a/b", HubName("a/b")),
        ("hf.co/a/b-GGUF:some-file.gguf", HubName("a/b-GGUF", "", "some-file.gguf")),
        ("a/b@refs/pr/7", HubName("a/b", "refs/pr/7")),
        ("model", None),
        ("a/b/c", None),
        ("no/such/model.gguf", None),
        ("models/one.gguf", None),
        ("../b", None),
        ("a/..", None),
        ("a/b@../../c", None),
        ("a/b:../c", None),
        ("/a/b", None),
        ("~/b", None),
        ("a/b c", None),
        ("a--b/c", None),
    ],
)
def test_names_of_the_hub_are_told_from_paths(text: str, name: HubName | None) -> None:
    assert parse_name(text) == name


def test_only_the_files_that_are_read_are_downloaded(hub: StubHub, tmp_path: Path) -> None:
    read = ["config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"]
    read += [*_SHARDS, "additional_chat_templates/rag.jinja"]
    unread = ["pytorch_model.bin", "original/model.safetensors", "consolidated.safetensors", "README.md", "run.py"]
    unread += ["x.pt", "model-00003-of-00003.safetensors", "onnx/config.json"]
    files = {name: name.encode() for name in [*read, *unread]}
    hub.repositories["acme/one"] = Repository({**files, "model.safetensors.index.json": _INDEX})
    config = resolve(tmp_path)
    wanted = {*read, "model.safetensors.index.json"}
    assert hub.fetched() == wanted
    assert files_below(Path(config.model)) == wanted
    assert config.served_model_name == ("acme/one",)
    assert config == ModelConfig(model=config.model, served_model_name=("acme/one",))
    hub.asked.clear()
    assert resolve(tmp_path) == config
    assert hub.fetched() == set()


@pytest.mark.parametrize(
    ("files", "taken"),
    [
        (("model.safetensors", "consolidated.safetensors"), {"model.safetensors"}),
        (("a.safetensors", "b.safetensors", "consolidated-1.safetensors"), {"a.safetensors", "b.safetensors"}),
    ],
)
def test_without_an_index_the_usual_layout_is_taken(
    hub: StubHub, tmp_path: Path, files: tuple[str, ...], taken: set[str]
) -> None:
    hub.repositories["acme/one"] = Repository({"config.json": _CONFIG, **{name: name.encode() for name in files}})
    resolve(tmp_path)
    assert hub.fetched() == {"config.json", *taken}


def test_a_revision_is_taken_by_its_name_or_its_commit(hub: StubHub, tmp_path: Path) -> None:
    hub.repositories["acme/one"] = Repository({"config.json": _CONFIG, "model.safetensors": b"w"})
    named, by_sign = resolve(tmp_path, revision="v1"), resolve(tmp_path, "acme/one@v1")
    by_commit = resolve(tmp_path, revision=REVISIONS["v1"])
    assert named.model == by_sign.model == by_commit.model
    assert Path(named.model).name == REVISIONS["v1"]
    with pytest.raises(ConfigError, match="no revision 'v2'; change --revision"):
        resolve(tmp_path, revision="v2")
    with pytest.raises(ConfigError, match="two revisions"):
        resolve(tmp_path, "acme/one@v1", revision="main")
    with pytest.raises(ConfigError, match="--revision"):
        resolve(tmp_path, revision="../../x")
    with pytest.raises(ConfigError, match="--revision is of a model on the hub"):
        resolve(tmp_path, str(tmp_path), revision="v1")


def test_a_gated_model_says_where_its_terms_are(hub: StubHub, tmp_path: Path) -> None:
    files = {"config.json": _CONFIG, "model.safetensors": b"w"}
    hub.repositories["acme/gated"] = Repository(files, token="secret", is_gated=True)
    with pytest.raises(ConfigError, match=rf"accept its terms at {hub.url}/acme/gated.*HF_TOKEN or --hf-token"):
        resolve(tmp_path, "acme/gated")
    assert resolve(tmp_path, "acme/gated", hf_token="secret").hf_token == ""
    hub.repositories["acme/gated"].is_open = False
    with pytest.raises(ConfigError, match="refuses the token for acme/gated"):
        resolve(tmp_path, "acme/gated", hf_token="expired", revision="v1")
    hub.repositories["acme/private"] = Repository(files, token="secret")
    with pytest.raises(ConfigError, match="no model on the hub that you may see"):
        resolve(tmp_path, "acme/private")
    assert resolve(tmp_path, "acme/private", hf_token="secret").model


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"config.json": _CONFIG, "pytorch_model.bin": b"x"}, "only pickles"),
        ({"config.json": _CONFIG}, "no weights"),
        ({"model.safetensors": b"x"}, "no config.json"),
        ({"config.json": _CONFIG, "model.safetensors.index.json": _INDEX, _SHARDS[0]: b"w"}, _SHARDS[1]),
        (
            {"config.json": _CONFIG, "model.safetensors.index.json": b'{"weight_map": {"a": "../x.safetensors"}}'},
            "x.saf",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_reason(
    hub: StubHub, tmp_path: Path, files: dict[str, bytes], reason: str
) -> None:
    hub.repositories["acme/one"] = Repository(files)
    with pytest.raises(ConfigError, match=reason):
        resolve(tmp_path)
    assert find_cached(Hub("acme/one", folder=str(tmp_path))) is None


@pytest.mark.parametrize(
    "evil",
    [
        Repository({"../../evil.safetensors": b"x", "/tmp/evil.safetensors": b"x", "a\\..\\evil.safetensors": b"x"}),
        Repository({"additional_chat_templates/../../../../evil.jinja": b"x"}),
        Repository({}, commit="../../evil"),
        Repository({}, commit="b" * 39),
        Repository({}, marks={"ETag": '"../../../evil"'}),
        Repository({}, marks={"ETag": '".."'}),
        Repository({}, marks={"X-Linked-Etag": "/etc/evil"}),
        Repository({}, marks={"X-Repo-Commit": "../../evil"}),
    ],
    ids=["names", "templates", "commit", "short", "etag", "dots", "linked", "header"],
)
def test_names_of_a_hub_stay_inside_of_the_cache(hub: StubHub, tmp_path: Path, evil: Repository) -> None:
    cache = tmp_path / "1" / "2" / "3" / "4"
    evil.files = {"config.json": _CONFIG, "model.safetensors": b"w", **evil.files}
    hub.repositories["acme/one"] = evil
    with suppress(ConfigError):
        resolve(cache)
    assert not [name for name in files_below(tmp_path) if "evil" in name or not name.startswith("1/2/3/4/")]
    assert not [name for name in hub.fetched() if "evil" in name]


def test_a_new_connection_is_watched_too(hub: StubHub, tmp_path: Path) -> None:
    hub.repositories["acme/one"] = Repository({"config.json": _CONFIG, "model.safetensors": b"w"})
    resolve(tmp_path)
    close_session()  # as the library does after a connection that fails
    hub.repositories["acme/one"].marks = {"ETag": '"../../evil"'}
    with pytest.raises(ConfigError, match=r"malformed \(etag"):
        hf_hub_download("acme/one", "config.json", revision="v1", cache_dir=tmp_path / "other", endpoint=hub.url)
    assert not list((tmp_path / "other").rglob("*config*"))


def test_an_unreachable_hub_leaves_what_is_in_the_cache(
    hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["acme/one"] = Repository({"config.json": _CONFIG, "model.safetensors": b"w"})
    config = resolve(tmp_path)
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(tmp_path) == config
    with pytest.raises(ConfigError, match=r"acme/two.*nor in the cache.*HF_HUB_OFFLINE"):
        resolve(tmp_path, "acme/two")
    assert hub.asked == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert resolve(tmp_path) == config


class Terminal(io.StringIO):
    """What a progress bar takes for a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("has_terminal", [True, False])
def test_a_terminal_shows_how_far_a_download_is(
    hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_terminal: bool
) -> None:
    hub.repositories["acme/one"] = Repository({"config.json": _CONFIG, "model.safetensors": b"w" * 2_000_000})
    said = Terminal() if has_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    resolve(tmp_path)
    bars = [line for line in said.getvalue().split("\r") if line.startswith("downloading acme/one: 100%")]
    assert bool(bars) is has_terminal
    assert ("downloading acme/one: 1 files, 0.00 GB" in said.getvalue()) is not has_terminal


def test_a_download_that_fails_stops_the_others(hub: StubHub, tmp_path: Path) -> None:
    names = [f"{letter}.safetensors" for letter in "abcdefgh"]
    hub.repositories["acme/one"] = Repository({"config.json": _CONFIG, **{name: name.encode() for name in names}})
    hub.refusing = "a.safetensors"
    try:
        with pytest.raises(ConfigError, match="is not complete, and the hub has ceased to answer"):
            resolve(tmp_path)
    finally:
        hub.refusing = ""
    assert find_cached(Hub("acme/one", folder=str(tmp_path))) is None
    assert Path(resolve(tmp_path).model).is_dir()


def test_doctor_looks_at_what_is_downloaded(hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    [finding] = examine_given_model("acme/one", PlanConfig())
    assert finding.text.endswith("run `blink pull acme/one`")
    hub.repositories["acme/one"] = Repository({"config.json": _CONFIG, "model.safetensors": b"w"})
    localize(ModelConfig(model="acme/one"))
    hub.asked.clear()
    [finding] = examine_given_model("acme/one", PlanConfig())
    assert "config.json: 'num_attention_heads' is missing" in finding.text
    assert hub.asked == []


def test_a_tokenizer_comes_without_its_model(hub: StubHub, tmp_path: Path) -> None:
    files = {"config.json": _CONFIG, "tokenizer.json": b"{}", "model.safetensors": b"w"}
    hub.repositories["acme/words"] = Repository(files)
    config = localize(ModelConfig(tokenizer="acme/words", tokenizer_revision="v1", download_dir=str(tmp_path)))
    assert hub.fetched() == {"config.json", "tokenizer.json"}
    assert Path(config.tokenizer).name == REVISIONS["v1"]
    assert config.served_model_name == ()


_GGUF = [
    "m-IQ4_XS.gguf",
    "m-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "m-UD-Q4_K_XL.gguf",
    "mmproj-F16.gguf",
    "BF16/m-BF16-00001-of-00002.gguf",
    "BF16/m-BF16-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("label", "chosen"),
    [
        ("", ["m-Q4_K_M.gguf"]),
        ("Q4_K_S", ["m-Q4_K_S.gguf"]),
        ("iq4_xs", ["m-IQ4_XS.gguf"]),
        ("UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        ("m-Q4_K_S.gguf", ["m-Q4_K_S.gguf"]),
        ("BF16", _GGUF[5:]),
    ],
)
def test_a_label_chooses_one_gguf_model_and_all_its_parts(label: str, chosen: list[str]) -> None:
    assert choose_gguf(_GGUF, label, "acme/one") == chosen


@pytest.mark.parametrize(("label", "word"), [("Q4_K", "IQ4_XS, Q4_K_M"), ("Q2_K", "BF16"), ("F16", "it has BF16")])
def test_a_label_that_is_not_there_shows_those_that_are(label: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        choose_gguf(_GGUF, label, "acme/one")


def test_a_part_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="one of 2 parts, of which 1 are there"):
        choose_gguf(_GGUF[:-1], "BF16", "acme/one")


def test_a_gguf_repository_gives_its_file(hub: StubHub, tmp_path: Path) -> None:
    hub.repositories["acme/one-GGUF"] = Repository({name: name.encode() for name in _GGUF})
    assert Path(resolve(tmp_path, "acme/one-GGUF").model).name == "m-Q4_K_M.gguf"
    split = resolve(tmp_path, "acme/one-GGUF:BF16")
    assert Path(split.model).name == "m-BF16-00001-of-00002.gguf"
    assert split.served_model_name == ("acme/one-GGUF:BF16",)
    assert hub.fetched() == {"m-Q4_K_M.gguf", *_GGUF[5:]}


def test_models_are_pulled_listed_and_removed(
    hub: StubHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    hub.repositories["acme/one"] = Repository({"config.json": _CONFIG, "model.safetensors": b"w" * 3_000_000})
    folder = f"--download-dir={tmp_path}"
    assert main(["pull", "acme/one", folder]) == 0
    assert Path(capsys.readouterr().out.strip()).name == REVISIONS["main"]
    assert main(["list", folder]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["acme/one", "3.00", "MB", "main", "now"]
    assert main(["rm", "acme/one", "--revision=v1", folder]) == 2
    assert main(["rm", "acme/one", folder]) == 0
    assert capsys.readouterr().out.startswith("removed acme/one: 3.00 MB")
    assert not list(tmp_path.rglob("*.safetensors"))
    assert main(["rm", "acme/one", folder]) == 2
    assert main(["pull", "one", folder]) == 2
