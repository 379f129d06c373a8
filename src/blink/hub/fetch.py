# SPDX-License-Identifier: Apache-2.0
"""Bring a model of the hub onto this machine: the files that Blink reads, and no others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from blink.errors import ConfigError
from blink.hub.client import Hub, Listing, UnreachableError
from blink.hub.selection import INDEX, choose_descriptions, choose_gguf, choose_weights, usable
from blink.models.weights.shards import read_index

logger = logging.getLogger("blink.hub")

_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")


def fetch_model(hub: Hub, label: str = "", load_format: str = "auto") -> Path:
    """Return the model's directory or .gguf file in the cache, downloaded as far as it is not there.

    label: which GGUF file, by a name of a quantisation or its own.

    Raises:
        ConfigError: there is no such model, or nothing in it that Blink reads, or it cannot be had.
    """
    listing = _list(hub)
    names = usable(listing.sizes)
    has_gguf = any(name.endswith(".gguf") for name in names)
    if label or load_format == "gguf" or (has_gguf and not choose_weights(names) and INDEX not in names):
        if not has_gguf:
            raise ConfigError(f"{hub.repository} has no GGUF files; leave out :{label or 'the label'}")
        parts = choose_gguf(names, label, hub.repository)
        folder = _download(hub, listing, parts)
        hub.keep(listing.commit)
        return folder / parts[0]
    if "config.json" not in names:
        raise ConfigError(f"{hub.repository} has no config.json and no GGUF files: Blink cannot run it.")
    folder = _download(hub, listing, [*choose_descriptions(names), *([INDEX] if INDEX in names else [])])
    if load_format != "dummy":
        _download(hub, listing, _weights_of(hub, folder, names))
    hub.keep(listing.commit)
    return folder


def find_cached(hub: Hub, label: str = "") -> Path | None:
    """Return the model's directory or .gguf file in the cache, None if it is not there."""
    folder = hub.find_snapshot()
    if folder is None or (folder / "config.json").is_file():
        return folder
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
    return folder / choose_gguf(names, label, hub.repository)[0] if names else None


def fetch_tokenizer(hub: Hub, label: str = "") -> Path:
    """Return the directory or .gguf file of a tokenizer in the cache; its model is not downloaded.

    Raises:
        ConfigError: there is none, or it cannot be had.
    """
    listing = _list(hub)
    names = usable(listing.sizes)
    if label or not choose_descriptions(names):
        return fetch_model(hub, label, "gguf")
    folder = _download(hub, listing, choose_descriptions(names))
    hub.keep(listing.commit)
    return folder


def _weights_of(hub: Hub, folder: Path, names: list[str]) -> list[str]:
    if INDEX in names:
        wanted = [path.name for path in read_index(folder / INDEX)]
        if absent := [name for name in wanted if name not in names]:
            raise ConfigError(f"{hub.repository} lacks {', '.join(absent)}, which its index names.")
        return wanted
    found = choose_weights(names)
    if not found:
        kind = "only pickles, which can run code" if any(n.endswith(_PICKLES) for n in names) else "no weights"
        raise ConfigError(f"{hub.repository} has {kind}: take a repository with *.safetensors or *.gguf files.")
    return found


def _list(hub: Hub) -> Listing:
    """Ask for the files; without a hub, those in the cache."""
    try:
        return hub.list_files()
    except UnreachableError as error:
        folder = hub.find_snapshot()
        if folder is None:
            raise ConfigError(
                f"MODEL '{hub.repository}' is no file or directory on this machine, nor in the cache {hub.cache}, and "
                f"the hub cannot be asked ({error})."
            ) from error
        logger.info("%s is taken from the cache: %s", hub.repository, error)
        paths = [path for path in folder.rglob("*") if path.is_file()]
        return Listing(folder.name, {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths})


def _download(hub: Hub, listing: Listing, names: list[str]) -> Path:
    try:
        return hub.download(listing, names)
    except UnreachableError as error:
        raise ConfigError(f"{hub.repository} is not complete, and the hub has ceased to answer: {error}") from error
