# SPDX-License-Identifier: Apache-2.0
"""Every flag stands on a page, as it is declared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from blink.bench.config import BenchConfig
from blink.cli.plan import PlanConfig
from blink.config import EngineConfig, FrontendConfig, ServeConfig
from blink.quantize.config import QuantizeConfig
from blink.view.config import TopConfig, TraceConfig
from blink.vllm.table import load_table
from flag_tables import flags_of, render_page

_ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_flags_is_what_they_declare() -> None:
    assert (_ROOT / "docs" / "flags.md").read_text() == render_page()


@pytest.mark.parametrize(
    "config_class", [ServeConfig, EngineConfig, FrontendConfig, BenchConfig, TopConfig, TraceConfig, QuantizeConfig]
)
def test_every_flag_stands_on_the_page(config_class: type) -> None:
    page = (_ROOT / "docs" / "flags.md").read_text()
    named = set(re.findall(r"^\| `(--[\w-]+)", page.replace("--[no-]", "--"), re.MULTILINE))
    assert set(flags_of(config_class)) <= named


def test_pages_name_only_flags_that_exist() -> None:
    others = {
        "--url",
        "--system",
        "--once",
        "--max-tokens",
        "--sample-prompt",
        "--exit-after-sample",
        "--help",
        "--run",
        "--version",
    }
    known = others.union(
        *(flags_of(kind) for kind in (ServeConfig, BenchConfig, TopConfig, TraceConfig, QuantizeConfig, PlanConfig))
    )
    known |= {*load_table(), "--no-", "--enable-x", "--disable-x"}  # and forms of names
    foreign = {
        "--shm-size",
        "--ipc",
        "--cap-add",
        "--cpuset-cpus",
        "--cpus",
        "--long",
        "--profile",
    }  # docker's and pytest's
    foreign |= {
        "--build-arg",
        "--constraint",
        "--no-deps",
        "--rm",
        "--target",
        "--tasks",
    }  # pip's, docker's and lm_eval's
    known |= set(re.findall(r'add\("(--[a-z-]+)"', (_ROOT / "benchmarks" / "flat" / "options.py").read_text()))
    for program in ("draft_heads", "kernels/latent_attention", "pacing", "scheduler_simulation", "speculation_replay"):
        text = (_ROOT / "benchmarks" / f"{program}.py").read_text()
        known |= set(re.findall(r'add_argument\("(--[a-z-]+)"', text))
    pages = [_ROOT / "README.md", *(_ROOT / "docs").glob("*.md")]
    unknown = {
        f"{page.name}: {flag}"
        for page in pages
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page.read_text().replace("--[no-]", "--"))
        if flag not in known | foreign and flag.replace("--no-", "--") not in known
    }
    assert unknown == set()
