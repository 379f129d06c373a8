# SPDX-License-Identifier: Apache-2.0
"""What `make` installs is the same on every fresh machine: all that tests need is pinned, for each Python served."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from pins import BUILD_TOOLS, EXTRAS, GATE, LONG, ROOT, torch_pin
from project import read_project
from requirements import list_pins

PYTHONS = ("3.10.0", "3.10.19", "3.11.7", "3.12.12")


def environment(python: str) -> dict[str, str]:
    return {
        "python_version": python.rpartition(".")[0],
        "python_full_version": python,
        "sys_platform": "linux",
        "os_name": "posix",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
        "extra": "",
    }


def pins_of(name: str, python: str) -> dict[str, Version]:
    """Return the versions that a file pins on one Python."""
    found: dict[str, Version] = {}
    for line in (ROOT / name).read_text().splitlines():
        if line.startswith("#"):
            continue
        pin = Requirement(line)
        assert re.fullmatch(r"==[\w.]+", str(pin.specifier)), f"{line}: a version that any machine can get"
        assert pin.url is None and not pin.extras, f"{line}: pip takes no extras in constraints"
        if pin.marker is None or pin.marker.evaluate(environment(python)):
            assert canonicalize_name(pin.name) not in found, f"{line}: pinned twice on {python}"
            found[canonicalize_name(pin.name)] = Version(str(pin.specifier)[2:])
    return found


def wanted(name: str) -> list[Requirement]:
    """Return what pyproject.toml names of what is installed under one file of pins."""
    project: dict[str, Any] = read_project(ROOT)
    extras = project["project"]["optional-dependencies"]
    lines = [*project["project"]["dependencies"], *project["build-system"]["requires"], *BUILD_TOOLS]
    lines += [line for extra in EXTRAS[name] for line in extras[extra]]
    # triton is torch's own where that is built for CUDA, and constraints-cpu.txt pins it elsewhere.
    return [Requirement(line) for line in lines if not line.startswith(("blink-serve", "triton"))]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", EXTRAS)
def test_all_that_pyproject_names_is_pinned_to_a_version_that_it_allows(name: str, python: str) -> None:
    pins = pins_of(name, python)
    for requirement in wanted(name):
        if requirement.marker is None or requirement.marker.evaluate(environment(python)):
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), str(requirement)


def come_along(requirements: list[Requirement], pins: dict[str, Version]) -> set[str]:
    """Return the names of what some requirements bring, as far as it is installed in the version that is pinned."""
    seen, left = set[str](), [(requirement.name, frozenset(requirement.extras)) for requirement in requirements]
    while left:
        package, extras = left.pop()
        try:
            installed = distribution(package)
        except PackageNotFoundError:
            continue
        pin = pins.get(canonicalize_name(package))
        if pin is not None and pin.public != Version(installed.version).public:
            continue  # the other file's version, which needs others
        needs = [Requirement(line) for line in installed.requires or ()]
        seen.add(canonicalize_name(package))
        for need in needs:
            contexts = [environment("3.11.7") | {"extra": extra} for extra in ("", *extras)]
            applies = need.marker is None or any(need.marker.evaluate(context) for context in contexts)
            if applies and canonicalize_name(need.name) not in seen:
                left.append((need.name, frozenset(need.extras)))
    return seen


@pytest.mark.parametrize("name", EXTRAS)
def test_all_that_comes_along_is_pinned_too(name: str) -> None:
    """As far as it is installed here."""
    pins = pins_of(name, "3.11.7")
    seen = come_along(wanted(name), pins)
    assert seen - set(pins) <= {"pip", "triton"} and len(seen) > 60


def test_both_files_name_one_torch_in_a_line_that_the_makefile_reads() -> None:
    assert all(torch_pin() in (ROOT / name).read_text().splitlines() for name in (GATE, LONG))


def test_users_machines_are_free_to_differ() -> None:
    project = read_project(ROOT)["project"]
    extras = [line for extra in ("engine", "gpu") for line in project["optional-dependencies"][extra]]
    assert [line for line in [*project["dependencies"], *extras] if "==" in line] == []


@pytest.mark.parametrize(("device", "extras"), [("cpu", ("engine", "dev")), ("cuda", ("engine", "gpu", "dev"))])
def test_the_gate_needs_no_resolution_of_what_its_extras_need(device: str, extras: tuple[str, ...]) -> None:
    """All of it is among the pins that pip installs as they are, but torch, which was installed before."""
    project = read_project(ROOT)["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    named = [Requirement(line) for line in lines if not line.startswith(("blink-serve", "triton"))]
    found = {canonicalize_name(Requirement(line).name) for line in list_pins(device)}
    missing = {canonicalize_name(requirement.name) for requirement in named} - found
    assert missing | come_along(named, pins_of(GATE, "3.11.7")) - found <= {"torch", "pip", "triton"}
    assert ("nvidia-cublas" in found) == (device == "cuda") and ("triton" in found) == (device == "cpu")
