# SPDX-License-Identifier: Apache-2.0
"""Products with weights of 16 bits, each by the fastest of the algorithms that cuBLAS offers for its shape.

Its own first choice is up to a quarter slower for some shapes of 64 to 512 rows (benchmarks/README.md). So while a
server prepares its steps each product's algorithms are timed. A file keeps which were chosen: a server that is started
again computes the same bits.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch import Tensor

from blink.kernels.gpu import cublas, cublas_lt
from blink.kernels.gpu.cublas_lt import Algorithm, Product

logger = logging.getLogger("blink.engine")

_MIN_WEIGHT_BYTES = 4 << 20
_MAX_ROWS = 384  # of more, power is the limit, and what is fastest alone need not be in a step
_ROUNDS = 5
_MIN_GAIN = 0.03
_COLD_CACHES = 3  # their size in what is read to evict a weight
_HEAD_START = 50  # such reads, so that the host is never what is timed

Algorithms = dict[str, Algorithm | None]  # by what name_product() says; None: as PyTorch computes it

_chosen: Algorithms = {}
_kept: Algorithms = {}  # what the file says
_is_choosing = False


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias; x: [rows, in]; weight: [out, in]; both on the GPU."""
    algorithm = _find_algorithm(x, weight, bias) if _may_choose(x, weight, bias) else None
    if algorithm is None:
        return functional.linear(x, weight, bias)
    return Product(x, weight, bias).compute(algorithm)


def name_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str:
    """Return what products share that are computed alike, as "bfloat16 224 x 4096 x 28672"."""
    type_name = str(x.dtype).removeprefix("torch.")
    return f"{type_name} {' x '.join(map(str, (*x.shape, len(weight))))}{'' if bias is None else ' + bias'}"


@contextmanager
def choosing(path: Path) -> Iterator[None]:
    """Within it, each product that is computed for the first time gets its algorithm; the file keeps them.

    A file that cannot be read or written costs a warning, and the choices are made anew at the next start.
    """
    global _is_choosing
    try:
        machine = name_machine()
    except OSError:
        yield  # leave_room() has said that there is no such library
        return
    _kept.update(_read(path, machine))
    _is_choosing = True
    try:
        yield
    finally:
        _is_choosing = False
    if not _chosen.items() <= _kept.items():
        _kept.update(_chosen)
        _write(path, machine, _kept)


def name_machine() -> str:
    """Return what choices depend on beside the product: the GPU and the library.

    Raises:
        OSError: there is no such library.
    """
    free = cublas.count_free_multiprocessors()
    return f"{torch.cuda.get_device_name()}, {free} multiprocessors, cuBLASLt {cublas_lt.version()}"


def _may_choose(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    if x.dim() != 2 or len(x) > _MAX_ROWS or weight.nbytes < _MIN_WEIGHT_BYTES:
        return False
    operands = (x, weight) if bias is None else (x, weight, bias)
    return all(operand.dtype == x.dtype for operand in operands) and cublas_lt.can_compute(*operands)


def _find_algorithm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Algorithm | None:
    """Return what was chosen for such products; None if it was PyTorch's way, or nothing yet."""
    name = name_product(x, weight, bias)
    if name not in _chosen and _is_choosing and not torch.cuda.is_current_stream_capturing():
        _chosen[name] = _choose(name, Product(x, weight, bias))
    return _chosen.get(name)


def _choose(name: str, product: Product) -> Algorithm | None:
    """Return what the file says or else the fastest algorithm; None if the first choice is about as fast."""
    if name in _kept:
        kept = _kept[name]
        if kept is None or product.accepts(kept):
            return kept
    algorithms = product.list_algorithms()
    if not algorithms:
        return None
    times = _time(product, algorithms)
    best = min(times)
    return algorithms[times.index(best)] if best < times[0] * (1 - _MIN_GAIN) else None


def _time(product: Product, algorithms: list[Algorithm]) -> list[float]:
    """Return the milliseconds that each algorithm takes with a weight that no cache holds, medians of some rounds."""
    for algorithm in algorithms:
        product.compute(algorithm)  # loads its code
    evictor = torch.zeros(_COLD_CACHES * torch.cuda.get_device_properties().L2_cache_size // 4, device="cuda")
    for _ in range(_HEAD_START):
        evictor.sum()
    pairs: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in algorithms]
    for _ in range(_ROUNDS):
        for own, algorithm in zip(pairs, algorithms, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            evictor.sum()
            start.record()
            product.compute(algorithm)
            end.record()
            own.append((start, end))
    torch.cuda.synchronize()
    return [statistics.median(start.elapsed_time(end) for start, end in own) for own in pairs]


def _read(path: Path, machine: str) -> Algorithms:
    try:
        tables = json.loads(path.read_text())
        return {name: code and _decode(code) for name, code in tables.get(machine, {}).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        logger.warning("algorithms of products are chosen anew: cannot read %s (%s)", path, error)
        return {}


def _decode(code: str) -> Algorithm:
    algorithm = bytes.fromhex(code)
    if len(algorithm) != cublas_lt.ALGORITHM_BYTES:
        raise ValueError(f"an algorithm has {len(algorithm)} bytes")
    return algorithm


def _write(path: Path, machine: str, chosen: Algorithms) -> None:
    try:
        tables = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        tables = {}
    tables[machine] = {name: algorithm and algorithm.hex() for name, algorithm in sorted(chosen.items())}
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(tables, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        logger.warning(
            "algorithms of products will be chosen anew at the next start: cannot write %s (%s)", path, error
        )
