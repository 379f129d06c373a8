# SPDX-License-Identifier: Apache-2.0
"""Builds the archive that a Linux kernel boots from: busybox and the modules of the rig."""

from __future__ import annotations

import gzip
import lzma
import re
import stat
from pathlib import Path

# crc32_generic: soft-RoCE asks the crypto layer for crc32 and cannot add a link without it.
MODULES = (
    "virtio_pci",
    "9p",
    "9pnet_virtio",
    "overlay",
    "virtio_net",
    "dummy",
    "crc32_generic",
    "ib_uverbs",
    "rdma_rxe",
)
_ALIGNMENT = 4  # bytes; kernels since 6.1.0-56 take no header elsewhere
_FOLDERS = ("bin", "dev", "proc", "sys", "modules", "host", "tools", "rw", "newroot")


def build_initramfs(kernel: Path, busybox: Path) -> bytes:
    """Return the compressed archive, to which others may be strung; `kernel` holds lib/modules."""
    entries = [_entry(name, stat.S_IFDIR | 0o755, b"") for name in _FOLDERS]
    entries.append(_entry("bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes()))
    for number, (name, module) in enumerate(_modules_in_order(kernel).items()):
        entries.append(_entry(f"modules/{number:03}-{name}.ko", stat.S_IFREG | 0o644, module))
    packed = gzip.compress(_archive(entries), 1)
    return packed + bytes(-len(packed) % _ALIGNMENT)  # zeros between archives are skipped


def file_archive(name: str, data: bytes) -> bytes:
    """Return an archive of one file; the kernel unpacks archives that are strung together."""
    return _archive([_entry(name, stat.S_IFREG | 0o755, data)])


def _modules_in_order(kernel: Path) -> dict[str, bytes]:
    """Return the modules and all that they need, each after what it needs."""
    files = {path.name.split(".")[0].replace("-", "_"): path for path in (kernel / "lib/modules").rglob("*.ko*")}
    found: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name in found or name not in files:  # what is no module is built in
            return
        data = files[name].read_bytes()
        data = lzma.decompress(data) if files[name].suffix == ".xz" else data
        needed = re.search(rb"\0depends=([^\0]*)\0", data)
        for other in (needed[1] if needed else b"").decode().split(","):
            add(other.replace("-", "_"))
        found[name] = data

    for name in MODULES:
        add(name)
    return found


def _archive(entries: list[bytes]) -> bytes:
    data = b"".join([*entries, _entry("TRAILER!!!", 0, b"")])
    return data + bytes(-len(data) % 512)


def _entry(name: str, mode: int, data: bytes) -> bytes:
    """Return one entry in cpio's "newc" format."""
    path = name.encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + path
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)
