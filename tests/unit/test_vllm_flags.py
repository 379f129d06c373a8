# SPDX-License-Identifier: Apache-2.0
"""Command lines of `vllm serve`: each flag is decided, and what is pasted starts or says why not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from blink.cli import main as cli
from blink.cli.command_line import CommandLine, translate
from blink.cli.flags import build_config
from blink.config import ServeConfig
from blink.errors import ConfigError
from blink.vllm.options import to_own_options
from blink.vllm.table import load_table
from flag_tables import flags_of, render_vllm_page

_ROOT = Path(__file__).resolve().parents[2]
_NAMES = [
    line
    for line in (_ROOT / "tests/shared/vllm_flags.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
_OWN = flags_of(ServeConfig)


def read(*words: str) -> CommandLine:
    return translate(words, _OWN)


def serve(*words: str) -> ServeConfig:
    return build_config(ServeConfig, cli.parse(["serve", *words]))


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*words)
    return caught.value.message


def test_every_flag_of_vllm_is_decided() -> None:
    assert [name for name in _NAMES if name not in load_table()] == []


@pytest.mark.parametrize("action", ["same", "alias", "config", "override", "quiet", "only", "keys"])
def test_every_decision_can_be_kept(action: str) -> None:
    flags = [flag for flag in dict.fromkeys(load_table().values()) if flag.action == action]
    assert flags
    for flag in flags:
        assert flag.kind in ("switch", "value", "list", "texts", "optional"), flag
        assert bool(flag.reason) == (action in ("quiet", "only", "keys")), flag
        assert (flag.name in _OWN) == (action == "same"), flag
        if action == "alias":
            assert flag.words[0] in _OWN, flag
        if action == "only" and flag.is_switch:
            assert flag.words in (("off",), ("on",)), flag
        for named in re.findall(r"(?<![\w-])--[a-z][\w-]+", flag.reason):
            assert named in _OWN, flag


def test_flags_of_both_are_of_one_kind() -> None:
    for flag in dict.fromkeys(load_table().values()):
        if flag.action == "same":
            action = _OWN[flag.name]
            known = {(action.type or str)(word.rsplit("=", 1)[1]) for word in flag.words}  # pyright: ignore
            assert (action.nargs == 0) == flag.is_switch, flag
            assert action.choices is None or known <= set(action.choices), flag


def test_the_page_about_vllm_is_what_the_table_says() -> None:
    assert (_ROOT / "docs" / "from-vllm.md").read_text() == render_vllm_page()


@pytest.mark.parametrize(
    ("words", "own"),
    [
        (["--max_model_len", "8192"], ["--max-model-len=8192"]),
        (["--max-model-len=auto"], ["--max-model-len=-1"]),
        (["--max_model_len", "-1"], ["--max-model-len=-1"]),
        (["-q", "fp8"], ["--quantization=fp8"]),
        (["--dtype", "half"], ["--dtype=float16"]),
        (["--block-size", "128"], ["--block-size=64"]),
        (["--no-enable-prefix-caching"], ["--no-enable-prefix-caching"]),
        (["--disable-prefix-caching"], ["--no-enable-prefix-caching"]),
        (["--no_enable_log_requests"], ["--no-enable-log-requests"]),
        (["--enable-log-stats"], ["--no-disable-log-stats"]),
        (["-asc", "2"], ["--frontend-workers=2"]),
        (["--device-memory-utilization", "0.5"], ["--gpu-memory-utilization=0.5"]),
        (["m", "--served-model-name", "a", "b"], ["m", "--served-model-name=a", "--served-model-name=b"]),
        (["m", "--api-key", "a", "b"], ["m", "--api-key=a", "--api-key=b"]),
        (["--api-key", "a", "--api-key", "b"], ["--api-key=a", "--api-key=b"]),
        (["--allowed-origins", '["x", "y"]'], ["--allowed-origins=x", "--allowed-origins=y"]),
        (["--allowed_methods=GET"], ["--allowed-methods=GET"]),
        (["m", "--hf-token"], ["m"]),
        (["--hf-token", "t", "m"], ["--hf-token=t", "m"]),
        (["--log-level", "INFO"], ["--log-level=info"]),
        (["--frontend_workers", "2"], ["--frontend-workers=2"]),
        (["--seed", "-3"], ["--seed=-3"]),
        (["--load-format", "mistral", "--tokenizer_mode=mistral"], ["--load-format=auto"]),
        (["--rope-theta", "1e6"], ['--hf-overrides={"rope_theta": 1000000.0}']),
        (["--hf-overrides", '{"a": 1}', "--rope-theta", "5"], ['--hf-overrides={"a": 1, "rope_theta": 5}']),
        (["--hf-overrides.a.b", "2k", "--hf_overrides.a.c=x"], ['--hf-overrides={"a": {"b": 2000, "c": "x"}}']),
        (["--hf-overrides.a+", "x,y"], ['--hf-overrides={"a": ["x", "y"]}']),
        (["--default-chat-template-kwargs", '{"a": false}'], ['--default-chat-template-kwargs={"a": false}']),
        (["-pp=1", "-dp", "1", "-n", "1", "-r", "0", "-dcp", "1"], ["--data-parallel-size=1"]),
        (["-tp", "2"], ["--tensor-parallel-size=2"]),
        (["-dp", "2", "-dpl", "2", "-dpb", "mp", "-asc", "2"], ["--data-parallel-size=2", "--frontend-workers=2"]),
        (["--no-enable-lora", "--max-logprobs", "10", "--swap-space=0"], ["--no-enable-lora"]),
        (
            ["--enable-lora", "--lora-modules", "a=b", "c=d"],
            ["--enable-lora", "--lora-modules=a=b", "--lora-modules=c=d"],
        ),
        (["--weight-transfer-config", "{ }", "--cpu-offload-gb", "0"], []),
        (["--kv-transfer-config", "{ }"], ["--kv-transfer-config={ }"]),
        (["--speculative-config", "None"], ["--speculative-config={}"]),
        (
            ["-sc.method", "ngram", "-sc.prompt_lookup_max=3"],
            ['--speculative-config={"method": "ngram", "prompt_lookup_max": 3}'],
        ),
    ],
)
def test_a_flag_of_vllm_becomes_blinks_own(words: list[str], own: list[str]) -> None:
    assert read(*words).words == own


@pytest.mark.parametrize(
    ("words", "ignored"),
    [
        (["--enforce-eager"], ["--enforce-eager"]),
        (["--no-enforce-eager"], ["--no-enforce-eager"]),
        (["-O3", "-O=2", "-O", "1"], ["-O3", "-O=2", "-O"]),
        (["-cc", '{"level": 3}'], ["-cc"]),
        (["--compilation-config.level", "3", "--compilation-config.a.b=c"], ["--compilation-config"]),
        (["--cudagraph_capture_sizes", "1", "2", "4", "--enable-chunked-prefill"], ["--cudagraph_capture_sizes"]),
        (["--swap-space", "4", "--disable-log-requests"], ["--swap-space", "--disable-log-requests"]),
        (["--limit-mm-per-prompt", "image=2"], ["--limit-mm-per-prompt"]),
        (["--max-logprobs", "-1"], ["--max-logprobs"]),
        (["--structured-outputs-config.backend", "xgrammar"], []),
        (["-dcp", "1"], []),
    ],
)
def test_what_has_no_effect_is_told(words: list[str], ignored: list[str]) -> None:
    line = read(*words)
    assert line.words == []
    assert [text.split(" (")[0] for text in line.ignored][: len(ignored)] == ignored
    assert all(text.endswith(")") for text in line.ignored)


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        (["-dcp", "2"], ["--decode-context-parallel-size 2", "fewer GPUs than asked", "one GPU"]),
        (["--pipeline_parallel_size=4"], ["--pipeline-parallel-size 4", "one GPU"]),
        (["-ep"], ["--enable-expert-parallel", "not yet"]),
        (["--fully-sharded-loras"], ["--fully-sharded-loras", "not yet: adapters on a GPU"]),
        (["--lora-dtype", "float32"], ["--lora-dtype float32", "the model's compute type"]),
        (["--logprobs-mode", "processed_logprobs"], ["--logprobs-mode processed_logprobs", "before temperature"]),
        (["--structured-outputs-config.disable_any_whitespace=true"], ["disable_any_whitespace=true"]),
        (["--cpu-offload-gb", "10"], ["not yet"]),
        (["--middleware", "a.b"], ["no code is loaded"]),
        (["--root-path", "/x"], ["proxy"]),
        (["--max-modl-len", "3"], ["unrecognized flag --max-modl-len", "did you mean --max-model-len?"]),
        (["--enable-lorra"], ["did you mean --enable-lora?"]),
        (["--qqqq"], ["unrecognized flag --qqqq"]),
        (["-zz", "2"], ["unrecognized flag -zz"]),
        (["--enforce-eager=true"], ["takes no value", "--no-enforce-eager"]),
        (["--tensor-parallel-size"], ["--tensor-parallel-size needs a value"]),
        (["--port", "--host", "x"], ["--port needs a value"]),
        (["--allowed-origins", "[1]"], ["--allowed-origins must be a JSON list"]),
        (["--hf-overrides", "[1]"], ["--hf-overrides must be a JSON object"]),
        (["--hf-overrides.a", "1", "--hf-overrides.a.b", "2"], ["a has a value already"]),
        (["--api-key", "secret", "/models/x"], ["--api-key", "MODEL"]),
        (["--config", "/no/such.yaml"], ["--config /no/such.yaml cannot be read"]),
    ],
)
def test_what_blink_does_not_do_is_refused_by_name_and_reason(words: list[str], reasons: list[str]) -> None:
    message = refusal(*words)
    assert [reason for reason in reasons if reason not in message] == [], message


def test_a_file_gives_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        """
model: acme/one
port: 9000
max_model_len: 4K
api-key: [a, b]
served-model-name: one
enable-prefix-caching: false
enforce-eager: true
trust-remote-code: false
pipeline-parallel-size: 1
allowed-origins: ["http://x"]
hf-overrides: {rope_theta: 5.0}
chat-template: null
"""
    )
    found = serve("--config", str(file), "--port", "9001", "--api-key", "c")
    assert found.frontend.port == 9001
    assert found.frontend.api_key == ("c",)
    assert found.engine.model.model == "acme/one"
    assert found.engine.model.max_model_len == 4096
    assert found.engine.model.served_model_name == ("one",)
    assert found.engine.enable_prefix_caching is False
    assert found.frontend.allowed_origins == ("http://x",)
    assert json.loads(found.engine.model.hf_overrides) == {"rope_theta": 5.0}
    assert serve("other/model", f"--config={file}").engine.model.model == "other/model"


@pytest.mark.parametrize("text", ["- a", "a: [", "1: 2", "port: {", "!!python/object:os.system {}", "no-such: 1"])
def test_a_file_without_flags_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    refusal("--config", str(tmp_path / "x.yaml"))


def test_the_environment_gives_what_no_flag_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "33")
    assert serve().frontend.log_level == "warning"
    assert serve().frontend.keep_alive_timeout == 33
    assert serve("--log-level", "error").frontend.log_level == "error"


def test_flags_of_another_command_are_named() -> None:
    own = {name: action for name, action in flags_of(ServeConfig).items() if name != "--port"}
    with pytest.raises(ConfigError, match="--port is no flag of this command"):
        translate(["--port", "1"], own)


def test_help_stays_short(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", capsys.readouterr().out))
    assert not shown & {flag.name for flag in load_table().values() if flag.action not in ("same", "config")}


def test_options_of_vllms_llm_are_read_as_its_flags() -> None:
    options = {"pipeline_parallel_size": 1, "trust_remote_code": True, "dtype": "half", "max_model_len": None, "x": 1}
    more = {"enforce_eager": True, "hf_overrides": {"a": 1}, "rope_theta": 5, "device_memory_utilization": 0.5}
    found = to_own_options({**options, **more}, {"dtype", "max_model_len", "hf_overrides", "gpu_memory_utilization"})
    overrides = json.loads(found.pop("hf_overrides"))
    assert overrides == {"a": 1, "rope_theta": 5}
    assert found == {"dtype": "float16", "x": 1, "gpu_memory_utilization": 0.5}
    for refused in ({"pipeline_parallel_size": 2}, {"fully_sharded_loras": True}):
        with pytest.raises(ConfigError, match=r"not yet|fewer GPUs"):
            to_own_options(refused, ())


def test_a_single_served_name_is_one_name() -> None:
    found = to_own_options(
        {"served_model_name": "abc", "max_model_len": "auto"}, {"served_model_name", "max_model_len"}
    )
    assert found == {"served_model_name": ("abc",), "max_model_len": -1}


@pytest.mark.parametrize(("task", "convert"), [("embed", "embed"), ("embedding", "embed"), ("score", "classify")])
def test_an_older_name_has_words_of_its_own_for_values(task: str, convert: str) -> None:
    assert serve("m", "--task", task).engine.model.convert == convert
    assert to_own_options({"task": task}, {"convert"}) == {"convert": convert}
