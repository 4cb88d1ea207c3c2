"""cuBLASLt by its C interface: products by an algorithm that is named, where torch's go by the library's first guess.

The library is the one that torch has loaded, matrices are what it calls column-major: y [M, N] = x wᵀ is yᵀ = w xᵀ
there, with w [N, K] read as a [K, N] that is transposed.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

#: Releases whose algorithms go by the numbers below: 13.1.
_RELEASE = 1301

#: The family of Hopper's kernels (nvjet), of which an `Algorithm` is one, and K by 64 with as many stages as fit.
_FAMILY, _DEPTH_64 = 66, 35

#: cudaDataType_t, cublasComputeType_t, cublasOperation_t
_TYPES = {torch.bfloat16: 14, torch.float16: 2}
_FLOAT32, _COMPUTE_FLOAT32, _TRANSPOSED = 0, 68, 1

#: Attributes of an operation (cublasLtMatmulDescAttributes_t), of an algorithm (cublasLtMatmulAlgoConfigAttributes_t).
_TRANSPOSE_FIRST = 3
_TILE, _OPTION, _STAGES, _CLUSTER = 1, 5, 6, 8

#: Shapes that are remembered, of some 0.5 KiB each; numbers of rows differ from step to step.
_MOST_PLANS = 1024

#: Rows of all matrices begin on 16 bytes, as the copy engine needs it.
_ALIGNED = 8


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


_SIGNATURES: dict[str, tuple[type, ...]] = {
    "Create": (c_void_p,),
    "MatmulDescCreate": (c_void_p, c_int, c_int),
    "MatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "MatrixLayoutCreate": (c_void_p, c_int, c_uint64, c_uint64, c_int64),
    "MatrixLayoutDestroy": (c_void_p,),
    "MatmulAlgoInit": (c_void_p, *(c_int,) * 7, c_void_p),
    "MatmulAlgoConfigSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "MatmulAlgoCheck": (c_void_p,) * 8,
    "Matmul": (*(c_void_p,) * 14, c_size_t, c_void_p),
}


class CublasltError(RuntimeError):
    """The library refused."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Programs of `columns` of the result (rows of the weight) by `rows` of x, in clusters.

    `tile`, `cluster` and `option` are the library's numbers for them. Its manual does not explain the option; in its
    own proposals 1 stands for the weight's rows as those of the tensor core, 2 for clusters along x, and 4 for 24,576
    results a program and more.
    """

    columns: int
    rows: int
    tile: int
    cluster: int
    option: int

    def fill(self, num_rows: int, num_out: int, num_sms: int) -> float:
        """The share of what `num_sms` processors compute, while any of them does, that is of the result."""
        programs = -(-num_rows // self.rows) * -(-num_out // self.columns)
        waves = -(-programs // num_sms)
        return num_rows * num_out / (waves * num_sms * self.rows * self.columns)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A product of one shape: matrices as the library knows them, and bytes of workspace, None if it does not fit."""

    chosen: _Algorithm
    weight: c_void_p
    x: c_void_p
    y: c_void_p
    workspace: int | None


class Cublaslt:
    """The library, ready for products on the current device. Its methods raise CublasltError."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, f"cublasLt{name}")
            function.argtypes, function.restype = arguments, c_int
        self._handle, self._operation = c_void_p(), c_void_p()
        self._call("Create", byref(self._handle))
        self._call("MatmulDescCreate", byref(self._operation), _COMPUTE_FLOAT32, _FLOAT32)
        self._set("MatmulDesc", self._operation, _TRANSPOSE_FIRST, c_int32(_TRANSPOSED))
        self._configured: dict[tuple[Algorithm, torch.dtype], _Algorithm] = {}
        self._plans: dict[tuple[Algorithm, torch.dtype, int, int, int], _Plan] = {}

    def multiply(self, x: Tensor, weight: Tensor, algorithm: Algorithm) -> Tensor | None:
        """x [M, K] times weight [N, K] transposed, in their type: [M, N]. None where the algorithm does not fit."""
        (num_rows, num_in), num_out = x.shape, len(weight)
        dense = x.is_contiguous() and weight.is_contiguous() and weight.dtype == x.dtype
        aligned = not any((num_in % _ALIGNED, num_out % _ALIGNED, x.data_ptr() % 16, weight.data_ptr() % 16))
        if not dense or not aligned or x.dtype not in _TYPES:
            return None
        plan = self._plan(algorithm, x.dtype, num_rows, num_in, num_out)
        if plan.workspace is None:
            return None
        y = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
        workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=x.device)
        self._call(
            "Matmul",
            *(self._handle, self._operation, byref(c_float(1.0))),
            *(weight.data_ptr(), plan.weight, x.data_ptr(), plan.x, byref(c_float(0.0))),
            *(y.data_ptr(), plan.y, y.data_ptr(), plan.y, byref(plan.chosen)),
            *(workspace.data_ptr(), plan.workspace, torch.cuda.current_stream(x.device).cuda_stream),
        )
        return y

    def _plan(self, algorithm: Algorithm, dtype: torch.dtype, num_rows: int, num_in: int, num_out: int) -> _Plan:
        """Made once a shape: a step without a graph asks for the same one in every layer."""
        key = algorithm, dtype, num_rows, num_in, num_out
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) == _MOST_PLANS:
                self._forget_plans()
            chosen, kind, found = self._configure(algorithm, dtype), _TYPES[dtype], _Found()
            sizes = (num_in, num_out), (num_in, num_rows), (num_out, num_rows)
            weight, x, y = (self._matrix(kind, *each) for each in sizes)
            check = self._library.cublasLtMatmulAlgoCheck
            fits = check(self._handle, self._operation, weight, x, y, y, byref(chosen), byref(found)) == 0
            plan = self._plans[key] = _Plan(chosen, weight, x, y, found.workspace if fits else None)
        return plan

    def _forget_plans(self) -> None:
        for plan in self._plans.values():
            for matrix in (plan.weight, plan.x, plan.y):
                self._library.cublasLtMatrixLayoutDestroy(matrix)
        self._plans.clear()

    def _configure(self, algorithm: Algorithm, dtype: torch.dtype) -> _Algorithm:
        configured = self._configured.get((algorithm, dtype))
        if configured is None:
            configured, kinds = _Algorithm(), (_TYPES[dtype],) * 4
            self._call("MatmulAlgoInit", self._handle, _COMPUTE_FLOAT32, _FLOAT32, *kinds, _FAMILY, byref(configured))
            for attribute, value in (
                (_TILE, c_uint32(algorithm.tile)),
                (_OPTION, c_uint32(algorithm.option)),
                (_STAGES, c_uint32(_DEPTH_64)),
                (_CLUSTER, c_uint16(algorithm.cluster)),
            ):
                self._set("MatmulAlgoConfig", byref(configured), attribute, value)
            self._configured[algorithm, dtype] = configured
        return configured

    def _matrix(self, kind: int, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        self._call("MatrixLayoutCreate", byref(layout), kind, rows, columns, rows)
        return layout

    def _set(self, kind: str, of: object, attribute: int, value: c_int32 | c_uint32 | c_uint16) -> None:
        self._call(f"{kind}SetAttribute", of, attribute, byref(value), ctypes.sizeof(value))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, f"cublasLt{name}")(*arguments)
        if status != 0:
            raise CublasltError(f"cublasLt{name} failed with status {status}.")


@functools.cache
def load(device: torch.device) -> Cublaslt | None:
    """The library that torch multiplies with; None without it, for another release, or on other GPUs than Hopper."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}", mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    library.cublasLtGetVersion.restype = c_size_t
    if library.cublasLtGetVersion() // 100 != _RELEASE:
        return None
    with torch.cuda.device(device):
        return Cublaslt(library)
