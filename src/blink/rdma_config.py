# SPDX-License-Identifier: Apache-2.0
"""The options of RDMA, which engine and frontends share."""

from __future__ import annotations

from dataclasses import dataclass

from blink.option import option, require


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaConfig:
    """RDMA between engine and frontends of two machines."""

    rdma_backend: str = option(
        "verbs", "library for RDMA, the same at both ends; nixl is an extra", choices=("verbs", "nixl")
    )
    nixl_transports: str = option(
        "rc", "UCX transports that the nixl backend may use; with any other it does not connect", metavar="LIST"
    )
    rdma_token_file: str = option("", "file with the secret that both ends share; also BLINK_RDMA_TOKEN")
    rdma_device: str = option("", "RDMA device; empty: the first with an active port")
    rdma_gid_index: int = option(-1, "which address of the device; -1: RoCE v2 over IPv4 if there is one")

    def __post_init__(self) -> None:
        require(self, "rdma_gid_index", -1, 255)
