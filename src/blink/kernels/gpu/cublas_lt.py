# SPDX-License-Identifier: Apache-2.0
"""GEMMs by an algorithm of the caller's choice, through the cuBLASLt that PyTorch has loaded.

Names and numbers are those of its header: https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from blink.kernels.gpu import cublas

_WORKSPACE_BYTES = 32 << 20
_MAX_ALGORITHMS = 32
_ALIGNMENT = 256  # bytes, which the library supposes of all addresses if it is told nothing
_TYPES = {torch.bfloat16: 14, torch.float16: 2}  # cudaDataType_t
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68
_TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER, _SM_COUNT_TARGET, _BIAS_TYPE = 3, 7, 8, 15, 26  # cublasLtMatmulDescAttributes_t
_ADD_BIAS = 4  # cublasLtEpilogue_t
_MAX_WORKSPACE, _REDUCTIONS = 1, 3  # cublasLtMatmulPreferenceAttributes_t
_IN_FLOAT32 = 2  # cublasLtReductionScheme_t: sums in an order that is always the same

Algorithm = bytes  # how to compute a GEMM: opaque, the same for all processes with the same version of the library
ALGORITHM_BYTES = 64

_Number = ctypes.c_int32 | ctypes.c_uint32 | ctypes.c_int64 | ctypes.c_uint64 | ctypes.c_size_t | ctypes.c_void_p


class _Found(ctypes.Structure):
    _fields_ = [
        ("algorithm", ctypes.c_uint64 * (ALGORITHM_BYTES // 8)),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class LtMatmul:
    """The GEMM x @ weight.T + bias; x: [rows, in], weight: [out, in], of one type that can_compute() allows.

    The library counts columns first, so that for it the transposed result is the GEMM of weight and transposed x.
    """

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        self._x, self._weight, self._bias = x, weight, bias
        self._type = _TYPES[x.dtype]
        self._description = _Object("MatmulDesc", _COMPUTE_FLOAT32, _FLOAT32)
        self._description.set(_TRANSPOSE_A, ctypes.c_int32(1))
        self._description.set(_SM_COUNT_TARGET, ctypes.c_int32(cublas.count_free_sms()))
        if bias is not None:
            self._description.set(_EPILOGUE, ctypes.c_int32(_ADD_BIAS))
            self._description.set(_BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
            self._description.set(_BIAS_TYPE, ctypes.c_int32(self._type))
        (rows, columns), outputs = x.shape, weight.shape[0]
        self._layouts = (self._lay_out(columns, outputs), self._lay_out(columns, rows), self._lay_out(outputs, rows))

    def list_algorithms(self) -> list[Algorithm]:
        """Return what the library would try, its first choice first."""
        preference = _Object("MatmulPreference")
        preference.set(_MAX_WORKSPACE, ctypes.c_size_t(_WORKSPACE_BYTES))
        preference.set(_REDUCTIONS, ctypes.c_uint32(_IN_FLOAT32))
        found, count = (_Found * _MAX_ALGORITHMS)(), ctypes.c_int()
        _call("MatmulAlgoGetHeuristic", *self._operands, preference.handle, len(found), found, ctypes.byref(count))
        return [bytes(each.algorithm) for each in found[: count.value] if each.status == 0]

    def accepts(self, algorithm: Algorithm) -> bool:
        """Tell whether the algorithm, perhaps of another process, computes this GEMM."""
        found, check = _Found(), library().cublasLtMatmulAlgoCheck
        status = check(cublas.handle(), *self._operands, _words(algorithm), ctypes.byref(found))
        return status == 0 and found.workspace_bytes <= _WORKSPACE_BYTES

    def compute(self, algorithm: Algorithm) -> Tensor:
        """Return the GEMM, computed on torch's stream."""
        x, weight = self._x, self._weight
        out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
        description, of_weight, of_x, of_out, _ = self._operands
        _call(
            "Matmul",
            description,
            ctypes.byref(ctypes.c_float(1)),
            ctypes.c_void_p(weight.data_ptr()),
            of_weight,
            ctypes.c_void_p(x.data_ptr()),
            of_x,
            ctypes.byref(ctypes.c_float(0)),
            *(ctypes.c_void_p(out.data_ptr()), of_out) * 2,  # what is added, nothing, and the result
            _words(algorithm),
            ctypes.c_void_p(_workspace(torch.cuda.current_device()).data_ptr()),
            ctypes.c_size_t(_WORKSPACE_BYTES),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        return out

    @property
    def _operands(self) -> tuple[ctypes.c_void_p, ...]:
        of_weight, of_x, of_out = (layout.handle for layout in self._layouts)
        return self._description.handle, of_weight, of_x, of_out, of_out

    def _lay_out(self, rows: int, columns: int) -> _Object:
        return _Object(
            "MatrixLayout", self._type, ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        )


def can_compute(*tensors: Tensor) -> bool:
    """Tell whether the tensors' types, addresses and order suit a GEMM."""
    return all(
        tensor.dtype in _TYPES and tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0 for tensor in tensors
    )


def version() -> int:
    """Return the library's version, as 130002."""
    function = library().cublasLtGetVersion
    function.restype = ctypes.c_size_t
    return function()


@functools.cache
def library() -> ctypes.CDLL:
    """Return cuBLASLt.

    Raises:
        OSError: PyTorch has none of its own.
    """
    return cublas.load("cublasLt")


class _Object:
    """One of the library's opaque objects, destroyed with this one."""

    def __init__(self, kind: str, *arguments: _Number | int) -> None:
        self._kind, self.handle = kind, ctypes.c_void_p()
        _check(getattr(library(), f"cublasLt{kind}Create")(ctypes.byref(self.handle), *arguments))

    def set(self, attribute: int, value: _Number) -> None:
        function = getattr(library(), f"cublasLt{self._kind}SetAttribute")
        _check(function(self.handle, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))))

    def __del__(self) -> None:
        getattr(library(), f"cublasLt{self._kind}Destroy")(self.handle)


@functools.cache
def _workspace(gpu: int) -> Tensor:
    """Return what all GEMMs of a GPU share: they run one after the other. Captured graphs use it."""
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=f"cuda:{gpu}")


def _words(algorithm: Algorithm) -> ctypes.Array[ctypes.c_uint64]:
    return (ctypes.c_uint64 * (ALGORITHM_BYTES // 8)).from_buffer_copy(algorithm)


def _call(name: str, *arguments: object) -> None:
    _check(getattr(library(), f"cublasLt{name}")(cublas.handle(), *arguments))  # one of cuBLAS is one of cuBLASLt


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt returned status {status}")
