"""The C interface of the native operators, as ctypes sees it. ctypes lets go of the GIL for each call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from kernels.cpu.build import load

_PTR, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float

#: Codes of storage types (`Dtype` in vec.h).
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

#: As DTYPES, of the KV pool.
POOL_DTYPES = {**DTYPES, torch.float8_e4m3fn: 3}

#: Argument types of each C function.
ARGUMENTS: dict[str, list[type]] = {
    "linear": [_PTR, _I32, _I64, _I64, _I64, _PTR, _I32, _PTR, _I64, _PTR, _I32],
    "pack": [_PTR, _I32, _I64, _I64, _PTR, _I64],
    "rms_norm": [_PTR, _I64, _PTR, _I64, _PTR, _I32, _F32, _I64, _I64, _PTR, _PTR, _I32],
    "head_norm": [_PTR, _I64, _I64, _I64, _I64, _PTR, _I32, _F32, _I32],
    "rope": [_PTR, _I64, _I64, _I64, _PTR, _I64, _PTR, _I64, _I64, _I32],
    "silu_and_mul": [_PTR, _I64, _I64, _I64, _PTR, _I32],
    "gelu_and_mul": [_PTR, _I64, _I64, _I64, _PTR, _I32],
    "write_kv": [
        *(_PTR, _I64, _PTR, _I64, _I32, _PTR, _I64),
        *(_PTR, _PTR, _I32, _F32, _F32, _I64, _I64, _I64, _I64, _I64),
    ],
    "attention": [
        *(_PTR, _I64, _I32, _I64, _I64, _I64),
        *(_PTR, _PTR, _I32, _I64, _I64, _I64, _I64),
        *(_PTR, _I64, _I64, _PTR, _PTR, _F32, _I64, _F32, _F32, _PTR),
    ],
    "route": [_PTR, _I64, _I64, _I64, _I32, _PTR, _PTR],
    "experts": [_PTR, _I32, _I64, _I64, _I64, _PTR, _PTR, _I64, _PTR, _PTR, _I32, _I64, _I64, _PTR],
    "soft_cap": [_PTR, _I64, _F32],
    "sample": [_PTR, _I64, _I64, _PTR, _PTR, _PTR, _PTR, _PTR, _PTR, _PTR],
    "logprobs": [_PTR, _I64, _I64, _PTR, _I64, _PTR, _PTR, _PTR, _PTR],
    "gumbel_noise": [_PTR, _PTR, _I64, _I64, _PTR],
    "run_program": [_PTR, _I64, _I64],
    "set_num_threads": [_I32],
    "num_threads": [],
}
#: Functions that answer whether their indices were in range, and those that answer a number.
_RESULTS: dict[str, type] = {
    "rope": ctypes.c_bool,
    "write_kv": ctypes.c_bool,
    "attention": ctypes.c_bool,
    "experts": ctypes.c_bool,
    "run_program": _I64,
    "num_threads": _I32,
}


class Library:
    """The native operators. Each attribute is the C function `sluicegate_<name>`; pointers are `data_ptr()`."""

    linear: Callable[..., None]
    pack: Callable[..., None]
    rms_norm: Callable[..., None]
    head_norm: Callable[..., None]
    rope: Callable[..., bool]
    silu_and_mul: Callable[..., None]
    gelu_and_mul: Callable[..., None]
    write_kv: Callable[..., bool]
    attention: Callable[..., bool]
    route: Callable[..., None]
    experts: Callable[..., bool]
    soft_cap: Callable[..., None]
    sample: Callable[..., None]
    logprobs: Callable[..., None]
    gumbel_noise: Callable[..., None]
    run_program: Callable[..., int]
    set_num_threads: Callable[[int], None]
    num_threads: Callable[[], int]

    def __init__(self, cache_dir: Path) -> None:
        """Load the library, building it if needed. Raises BuildError."""
        code = load(cache_dir)
        for name, arguments in ARGUMENTS.items():
            function = getattr(code, f"sluicegate_{name}")
            function.argtypes, function.restype = arguments, _RESULTS.get(name)
            setattr(self, name, function)
