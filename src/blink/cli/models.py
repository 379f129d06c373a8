# SPDX-License-Identifier: Apache-2.0
"""`blink pull`, `blink list` and `blink rm`: models of the hub on this machine."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path

from huggingface_hub import CachedRepoInfo, HFCacheInfo, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from rich.console import Console
from rich.table import Table

from blink.config import ModelConfig
from blink.errors import ConfigError
from blink.host.logs import set_up_logging
from blink.hub.localize import localize
from blink.hub.name import parse_name
from blink.models.weights.files import default_model_path


def run_pull(namespace: Namespace) -> int:
    """Download a model and print where it lies; return the exit status."""
    set_up_logging("info", "text", "blink: %(message)s")
    if parse_name(namespace.model) is None:
        raise ConfigError(f"MODEL '{namespace.model}' is no name on the hub, such as org/name or org/name:Q4_K_M")
    config = ModelConfig(
        model=namespace.model,
        revision=namespace.revision,
        hf_token=namespace.hf_token,
        download_dir=namespace.download_dir,
    )
    print(localize(config).model)
    return 0


def run_list(namespace: Namespace) -> int:
    """Print the models of the hub on this machine; return the exit status."""
    table = Table("model", "size", "revisions", "used", box=None, pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    default = default_model_path()
    if default.is_file():
        status = default.stat()
        table.add_row("SmolLM2-135M-Instruct (the default)", _size(status.st_size), "1", _ago(status.st_atime))
    for model in sorted(_models(_scan(namespace.download_dir)), key=lambda model: model.repo_id):
        revisions = [", ".join(sorted(revision.refs)) or revision.commit_hash[:8] for revision in model.revisions]
        table.add_row(model.repo_id, _size(model.size_on_disk), ", ".join(sorted(revisions)), _ago(model.last_accessed))
    console = Console()
    console.print(table if table.row_count else "no models on this machine; get one: blink pull org/name")
    return 0


def run_rm(namespace: Namespace) -> int:
    """Remove a model, or one revision of it; return the exit status."""
    name = parse_name(namespace.model)
    cache = _scan(namespace.download_dir)
    found = [model for model in _models(cache) if name is not None and model.repo_id == name.repository]
    if not found or name is None or cache is None:
        raise ConfigError(f"MODEL '{namespace.model}' is not in the cache; `blink list` shows what is")
    if name.label:
        raise ConfigError(f"a model is removed whole: give `blink rm {name.repository}`")
    wanted = namespace.revision or name.revision
    commits = [
        revision.commit_hash
        for revision in found[0].revisions
        if not wanted or wanted in revision.refs or wanted == revision.commit_hash
    ]
    if not commits:
        raise ConfigError(f"{name.repository} has no revision {wanted!r} in the cache")
    plan = cache.delete_revisions(*commits)
    plan.execute()
    print(f"removed {name.repository}: {_size(plan.expected_freed_size)}")
    return 0


def _scan(folder: str) -> HFCacheInfo | None:
    try:
        return scan_cache_dir(Path(folder or constants.HF_HUB_CACHE).expanduser())
    except (CacheNotFound, ValueError):
        return None


def _models(cache: HFCacheInfo | None) -> list[CachedRepoInfo]:
    return [repo for repo in cache.repos if repo.repo_type == "model"] if cache is not None else []


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 10**8 else f"{count / 1e6:.2f} MB"


def _ago(moment: float) -> str:
    hours = max(0.0, time.time() - moment) / 3600
    return "now" if hours < 1 else f"{hours:.0f} h ago" if hours < 48 else f"{hours / 24:.0f} days ago"
