# SPDX-License-Identifier: Apache-2.0
"""The files under deploy/: their command lines are Blink's, their paths are there, and their parts fit each other."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from blink.cli.flags import build_config
from blink.cli.main import parse
from blink.config import FrontendConfig, ServeConfig

_ROOT = Path(__file__).resolve().parents[2]
_DEPLOY = _ROOT / "deploy"
_CONTAINERFILE = (_DEPLOY / "Containerfile").read_text()


def documents(name: str) -> list[Any]:
    return [*yaml.safe_load_all((_DEPLOY / name).read_text())]


def command_lines() -> dict[str, list[str]]:
    """Every command line that starts a part of Blink."""
    compose = documents("compose.yaml")[0]["services"]
    unit = re.search(r"^ExecStart=\S+ (.*)$", (_DEPLOY / "systemd" / "blink.service").read_text(), re.MULTILINE)
    flags = re.search(r'BLINK_FLAGS="(.*)"', (_DEPLOY / "systemd" / "blink.service").read_text())
    assert unit and flags
    found = {f"compose {name}": compose[name]["command"] for name in ("engine", "frontend")}
    found |= {f"image {i}": json.loads(line) for i, line in enumerate(re.findall(r"^CMD (.*)$", _CONTAINERFILE, re.M))}
    found["systemd"] = shlex.split(unit[1].replace("$BLINK_FLAGS", flags[1]))
    found["kubernetes"] = documents("kubernetes/blink.yaml")[0]["spec"]["template"]["spec"]["containers"][0]["args"]
    found["kubernetes, cache-aware"] = cache_aware_container()["args"]
    return found


def cache_aware_container() -> dict[str, Any]:
    """The container that is told of a router that knows KV caches."""
    [patch] = documents("kubernetes/cache-aware/servers.yaml")
    return patch["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("place", command_lines())
def test_every_command_line_is_one_that_blink_takes(place: str) -> None:
    parse(command_lines()[place])


def test_images_copy_and_run_only_what_is_there() -> None:
    stages = re.findall(r"^FROM \S+ AS (\w+)", _CONTAINERFILE, re.M)
    assert stages == ["build", "frontend", "engine"]
    assert set(re.findall(r"--from=(\w+)", _CONTAINERFILE)) <= set(stages)
    extras = set(re.findall(r"blink-serve\[([\w,]+)\]", _CONTAINERFILE))
    declared = (_ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in declared for group in extras for extra in group.split(","))
    assert "\nwheel:" in (_ROOT / "Makefile").read_text()


def test_the_frontends_image_gets_neither_torch_nor_cuda() -> None:
    frontend = _CONTAINERFILE.split(" AS frontend")[1].split("\nFROM ")[0]
    assert "gpu" not in frontend and "engine" not in frontend and "nvidia" not in frontend


def test_compose_joins_frontend_and_engine_by_region_and_memory() -> None:
    services = documents("compose.yaml")[0]["services"]
    regions = {flag for name in ("engine", "frontend") for flag in services[name]["command"] if "--region" in flag}
    assert len(regions) == 1 and services["frontend"]["ipc"] == "service:engine"
    assert services["engine"]["ipc"] == "shareable"
    assert services["engine"]["build"]["target"] == "engine" and services["frontend"]["build"]["target"] == "frontend"
    mounted = [volume.split(":")[0] for service in services.values() for volume in service.get("volumes", ())]
    assert all((_DEPLOY / path).exists() for path in mounted if path.startswith("."))


def test_kubernetes_probes_routes_and_pool_lead_to_the_servers_port() -> None:
    deployment, service = documents("kubernetes/blink.yaml")
    pod = deployment["spec"]["template"]
    [container] = pod["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": FrontendConfig().port}]
    assert {container[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")} == {
        "http"
    }
    drain = next(int(flag.partition("=")[2]) for flag in container["args"] if flag.startswith("--shutdown-timeout"))
    assert drain + 10 < pod["spec"]["terminationGracePeriodSeconds"]
    pool, route = documents("kubernetes/inference-pool.yaml")
    labels = pod["metadata"]["labels"]
    for selector in (deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]):
        assert selector.items() <= labels.items()
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert pool["spec"]["targetPorts"] == [{"number": FrontendConfig().port}]
    [backend] = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])


def test_a_cache_aware_router_and_its_servers_agree() -> None:
    """The picker binds the port to which servers connect, and reads their topics, hashes and blocks as they are."""
    container, [values] = cache_aware_container(), documents("kubernetes/cache-aware/picker-values.yaml")
    engine = build_config(ServeConfig, parse(container["args"])).engine
    extension = values["inferenceExtension"]
    config = yaml.safe_load(extension["pluginsCustomConfig"][extension["pluginsConfigFile"]])
    scorer = next(each["parameters"] for each in config["plugins"] if each["type"] == "precise-prefix-cache-scorer")
    assert scorer["tokenProcessorConfig"]["blockSize"] == engine.block_size
    assert scorer["indexerConfig"]["tokenizersPoolConfig"]["modelName"] == engine.model.model
    events, picker = engine.kv_events, scorer["kvEventsConfig"]
    assert events.is_on and events.topic.startswith(picker["topicFilter"]) and "$(POD_IP):8000" in events.topic
    pool, _ = documents("kubernetes/inference-pool.yaml")
    host, port = events.endpoint.removeprefix("tcp://").split(":")
    assert host == pool["spec"]["endpointPickerRef"]["name"] and picker["zmqEndpoint"] == f"tcp://*:{port}"
    assert int(port) in {each["port"] for each in extension["extraServicePorts"]}
    assert values["inferencePool"]["modelServers"]["matchLabels"] == pool["spec"]["selector"]["matchLabels"]
    names = {plugin["pluginRef"] for profile in config["schedulingProfiles"] for plugin in profile["plugins"]}
    assert names <= {plugin["type"] for plugin in config["plugins"]}
    [base] = documents("kubernetes/blink.yaml")[0]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == base["name"] and "preStop" in base["lifecycle"]
    assert {*base["args"]} <= {*container["args"]}, "a patch replaces all arguments"
    [overlay] = documents("kubernetes/cache-aware/kustomization.yaml")
    folder = _DEPLOY / "kubernetes" / "cache-aware"
    paths = [*overlay["resources"], *(patch["path"] for patch in overlay["patches"])]
    assert all((folder / path).exists() for path in paths)
