# SPDX-License-Identifier: Apache-2.0
"""The options of a KV cache that goes on in host memory: vLLM's, and SGLang's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blink.errors import ConfigError
from blink.option import option, parse_object, require

_FLAG = "--kv-transfer-config"
_CONNECTOR = "OffloadingConnector"
_KEYS = ("kv_connector", "kv_role", "kv_connector_extra_config")
_EXTRA_KEYS = ("cpu_bytes_to_use", "block_size")  # of which the second has no effect: the block is --block-size


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Blocks that the KV cache has no memory for are kept in the host's."""

    kv_offloading_size: float = option(
        0.0,
        "GiB of host memory for blocks that leave the KV cache: docs/kv-offload.md; 0: none",
    )
    kv_offloading_backend: str = option("native", "what keeps them", choices=("native",))
    kv_transfer_config: str = option(
        "", "the same as a JSON object of vLLM's OffloadingConnector, with cpu_bytes_to_use", metavar="JSON"
    )
    enable_hierarchical_cache: bool = option(False, "the same by SGLang's flag, as large as the next two say")
    hicache_ratio: float = option(2.0, "size of that memory, in times the KV cache")
    hicache_size: int = option(0, "size of that memory in GB; 0: by --hicache-ratio")

    def __post_init__(self) -> None:
        require(self, "kv_offloading_size", 0)
        require(self, "hicache_ratio", 0.001)
        require(self, "hicache_size", 0)
        read_transfer(parse_object("kv_transfer_config", self.kv_transfer_config))

    @property
    def is_on(self) -> bool:
        """Whether blocks are kept in host memory."""
        return bool(self._sizes(1, 1))

    def host_bytes(self, cache_bytes: int, num_ranks: int = 1) -> int:
        """Return the host memory for blocks of all ranks, each of which has a KV cache of so many bytes; 0: none.

        Raises:
            ConfigError: several options ask for it.
        """
        sizes = self._sizes(cache_bytes, num_ranks)
        if len(sizes) > 1:
            raise ConfigError(f"{' and '.join(sizes)} ask for the same: leave one out")
        return next(iter(sizes.values()), 0)

    def _sizes(self, cache_bytes: int, num_ranks: int) -> dict[str, int]:
        """Return what each option asks for: vLLM's for all ranks together, SGLang's for each of them."""
        by_ratio = max(int(cache_bytes * self.hicache_ratio), 1)
        of_rank = self.hicache_size * 10**9 or by_ratio
        sizes = {
            "--kv-offloading-size": int(self.kv_offloading_size * (1 << 30)),
            _FLAG: read_transfer(parse_object("kv_transfer_config", self.kv_transfer_config)),
            "--enable-hierarchical-cache": of_rank * num_ranks,
        }
        if not self.enable_hierarchical_cache:
            del sizes["--enable-hierarchical-cache"]
        return {flag: size for flag, size in sizes.items() if size}


def read_transfer(values: Mapping[str, Any]) -> int:
    """Return the bytes that the object of --kv-transfer-config asks for; an empty one asks for none.

    Raises:
        ConfigError: it names what Blink does not do, or values out of range.
    """
    if not values:
        return 0
    if values.get("kv_connector") != _CONNECTOR:
        raise ConfigError(f"{_FLAG}: Blink has the {_CONNECTOR} alone, got {values.get('kv_connector')!r}")
    if values.get("kv_role", "kv_both") != "kv_both":
        raise ConfigError(f"{_FLAG}: kv_role may only be kv_both: this cache is one engine's own")
    extra = values.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise ConfigError(f"{_FLAG}: kv_connector_extra_config must be an object")
    for key, known in [*((key, _KEYS) for key in values), *((key, _EXTRA_KEYS) for key in extra)]:
        if key not in known:
            raise ConfigError(f"{_FLAG} has no {key!r} with the {_CONNECTOR}: it takes {', '.join(known)}")
    size = extra.get("cpu_bytes_to_use")
    if type(size) is not int or size < 1:
        raise ConfigError(f"{_FLAG}: cpu_bytes_to_use must be a whole number of bytes, got {size!r}")
    return size
