"""Kernels compiled by several threads, before they are first launched.

At its launch a kernel is compiled while everything waits: some 40 of them, half a second each, at a start
without compiled ones. A fifth of that is Python, which takes turns; the rest runs side by side.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from kernels._triton import triton


def compile_ahead(launches: Callable[[], object]) -> None:
    """Compile all kernels that `launches` would launch, or load those compiled before.

    It launches none of them, so that operators answer memory as they found it; what it asks of torch
    itself is done, and must not follow indices that kernels were to write. No other thread may launch kernels
    meanwhile.
    """
    run = triton.JITFunction.run
    seen: set[tuple[object, ...]] = set()

    def compile_alone(self: Any, *args: object, grid: object, warmup: bool, **options: object) -> None:
        del warmup
        mark = (self, *map(_kind, args), *options, *map(_kind, options.values()))
        if mark not in seen:  # a model's layers are alike, and to ask Triton takes longer
            seen.add(mark)
            run(self, *args, grid=grid, warmup=True, **options)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads, triton.AsyncCompileMode(threads):
        triton.JITFunction.run = compile_alone
        try:
            launches()
        finally:
            triton.JITFunction.run = run


def _kind(argument: Any) -> object:
    """Equal for arguments that a kernel is compiled for alike."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if (box := getattr(argument, "block_shape", None)) is not None:  # of a tensor, for the copy engine
        return argument.base.dtype, tuple(box)
    plain = argument is None or isinstance(argument, int | float | str)
    return argument if plain else id(argument)
