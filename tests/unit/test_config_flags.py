# SPDX-License-Identifier: Apache-2.0
"""The flags are the config dataclasses: every field can be given, and is given back unchanged."""

from __future__ import annotations

import argparse
import json
from dataclasses import Field, fields, is_dataclass, replace
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blink.cli.flags import add_flags, build_config, parse_integer, to_flags
from blink.config import EngineConfig, FrontendConfig, ModelConfig, ServeConfig
from blink.errors import ConfigError

# Before Python 3.13, argparse drops the "--" of "--flag=--".
_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8).filter("--".__ne__)
_KINDS = {
    bool: st.booleans(),
    # Values that every option accepts; what they refuse has a test of its own.
    int: st.integers(1, 64),
    float: st.floats(0.5, 1.0),
    str: _TEXT,
    tuple[str, ...]: st.lists(_TEXT, max_size=3).map(tuple),
}


def _values(config_class: type) -> st.SearchStrategy[Any]:
    """Any config of a class, each field either at its default or at any value that its type and choices allow."""
    hints = get_type_hints(config_class)

    def value(option: Field[Any]) -> st.SearchStrategy[Any]:
        kind = hints[option.name]
        if is_dataclass(kind):
            return _values(kind)  # pyright: ignore[reportArgumentType]
        if "choices" in option.metadata:
            return st.sampled_from(option.metadata["choices"])
        if option.metadata.get("metavar") == "JSON":
            offload = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1}}
            known = {"speculative_config": '{"method": "ngram"}', "kv_events_config": '{"topic": "kv"}'}
            known["kv_transfer_config"] = json.dumps(offload)
            told = known.get(option.name, '{"a": [1]}')
            return st.sampled_from(["", told])
        # An empty repeatable flag cannot be told from one that is absent.
        drawn = _KINDS[kind].filter(bool) if kind == tuple[str, ...] else _KINDS[kind]
        if option.name == "max_num_batched_tokens":  # never less than max_num_seqs
            drawn = st.integers(256, 4096)
        return st.just(option.default) | drawn

    return st.builds(config_class, **{option.name: value(option) for option in fields(config_class)})


def _parse(config_class: type, arguments: list[str]) -> Any:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_flags(parser, config_class)
    return build_config(config_class, parser.parse_args(arguments))


@settings(max_examples=40)
@given(_values(EngineConfig))
def test_engine_config_survives_the_way_through_flags(config: EngineConfig) -> None:
    assert _parse(EngineConfig, to_flags(config)) == config


@settings(max_examples=40)
@given(_values(FrontendConfig))
def test_frontend_config_survives_the_way_through_flags(config: FrontendConfig) -> None:
    assert _parse(FrontendConfig, to_flags(config)) == config


@pytest.mark.parametrize("config_class", [EngineConfig, FrontendConfig, ServeConfig])
def test_no_flags_give_the_defaults(config_class: type) -> None:
    assert _parse(config_class, []) == config_class()
    assert to_flags(config_class()) == []


def test_shared_fields_reach_both_halves_of_serve() -> None:
    arguments = ["some/model", "--region", "r", "--scheduling-policy", "priority", "--max-model-len", "4K"]
    config = _parse(ServeConfig, [*arguments, "--port", "1", "--max-num-seqs", "7"])
    model = ModelConfig(model="some/model", max_model_len=4096)
    assert config == ServeConfig(
        engine=replace(EngineConfig(), model=model, region="r", scheduling_policy="priority", max_num_seqs=7),
        frontend=replace(FrontendConfig(), model=model, region="r", port=1),
    )


def test_model_is_positional_or_a_flag_but_not_two_different_ones() -> None:
    assert (
        _parse(EngineConfig, ["a"])
        == _parse(EngineConfig, ["--model", "a"])
        == _parse(EngineConfig, ["a", "--model=a"])
    )
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        _parse(EngineConfig, ["a", "--model", "b"])


def test_repeatable_flag_replaces_its_default() -> None:
    config = _parse(FrontendConfig, ["--allowed-methods", "GET", "--allowed-methods", "POST"])
    assert config.allowed_methods == ("GET", "POST")


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--port", "70000"), ("--max-num-seqs", "0"), ("--max-num-seqs", "4096"), ("--gpu-memory-utilization", "1.5")],
)
def test_values_out_of_range_are_refused_by_name(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        _parse(ServeConfig, [flag, value, "--max-num-batched-tokens=2048"])


@pytest.mark.parametrize(
    "arguments", [["--port", "x"], ["--block-size", "17"], ["--device", "tpu"], ["--no-such-flag"]]
)
def test_wrong_flags_are_refused(arguments: list[str]) -> None:
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        _parse(ServeConfig, arguments)


@pytest.mark.parametrize(
    ("text", "value"), [("12", 12), ("-1", -1), ("4k", 4000), ("4K", 4096), ("1.5G", 3 << 29), ("2m", 2_000_000)]
)
def test_integers_take_decimal_and_binary_suffixes(text: str, value: int) -> None:
    assert parse_integer(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "0.0001k", "1e3", "4KB", "\u0661x"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_integer(text)


@pytest.mark.parametrize("config_class", [EngineConfig, FrontendConfig, ServeConfig])
def test_every_flag_has_help_text_that_formats(config_class: type) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, config_class)
    parser.format_help()
    assert all(action.help for action in parser._actions)


def test_a_field_may_have_a_flag_of_another_name() -> None:
    assert to_flags(FrontendConfig(rdma_engine="host:1")) == ["--rdma=host:1"]
    assert _parse(FrontendConfig, ["--rdma", "host:1"]).rdma_engine == "host:1"
