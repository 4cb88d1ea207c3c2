"""Programs: native operator calls written down once, then run for any number of rows in one call.

A step of a decoder is some 270 operator calls on the same weights and buffers, each 27 µs of Python and ctypes
where the operator itself may take 5. `record` runs a piece of model code with operators that note their
arguments instead of computing; `Program.run` makes the noted calls with another number of rows. The operators
are the same functions, so are the bits.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernels.backend import native, recording
from kernels.cpu.library import ARGUMENTS, Library

#: What a program may call, in the order of `program.cpp`, and which argument is the number of rows.
OPERATIONS = {
    "linear": 3,
    "rms_norm": 7,
    "head_norm": 4,
    "rope": 5,
    "silu_and_mul": 2,
    "gelu_and_mul": 2,
    "write_kv": 6,
    "attention": 3,
    "route": 1,
    "experts": 3,
}
_MAX_ARGUMENTS = 23

T = TypeVar("T")


class NotRecordable(Exception):
    """The code computes something that is no native operator, or not on all rows; the text says what."""


class Program:
    """Calls in their order. Keeps alive what it was told to; weights and caches are the caller's to keep."""

    def __init__(self, library: Library, calls: list[list[int]], names: list[str], memory: list[Tensor]) -> None:
        self._library = library
        self._calls = np.array(calls, np.int64).reshape(len(calls), 2 + _MAX_ARGUMENTS)
        self._names = names
        self._memory = memory

    def __len__(self) -> int:
        return len(self._names)

    def run(self, num_rows: int) -> None:
        """Make the calls for the first `num_rows` rows of every buffer, at most those of the recording.

        Raises IndexError for positions, slots or blocks out of range.
        """
        done = self._library.run_program(self._calls.ctypes.data, len(self._names), num_rows)
        if done < len(self._names):
            raise IndexError(f"{self._names[done]} (call {done} of the program) was given indices out of range.")


def record(body: Callable[[], T], num_rows: int) -> tuple[Program, T]:
    """`body`'s operator calls, which must all be for `num_rows` rows, and what it answers.

    Nothing is computed: `body`'s answer names the buffers that hold the results after each run. Buffers that
    it allocates belong to the program and are used again once nothing refers to them, as a run's order
    allows. Raises NotRecordable, with nothing changed.
    """
    library = native()
    if library is None:
        raise NotRecordable("the native operators are not in force.")
    recorder = _Recorder(num_rows)
    buffers = _Buffers()
    with recording(recorder), buffers:
        answer = body()
    return Program(library, recorder.calls, recorder.names, buffers.memory), answer


class _Recorder(Library):
    """The library's functions, which note their arguments."""

    def __init__(self, num_rows: int) -> None:
        self.calls: list[list[int]] = []
        self.names: list[str] = []
        self._num_rows = num_rows
        for name in ARGUMENTS:
            setattr(self, name, partial(self._note, name))

    def _note(self, name: str, *arguments: int | float | None) -> bool:
        if name not in OPERATIONS:
            raise NotRecordable(f"{name} cannot be a part of a program.")
        rows_at = OPERATIONS[name]
        if arguments[rows_at] != self._num_rows:
            raise NotRecordable(f"{name} is called for {arguments[rows_at]} of {self._num_rows} rows.")
        words = [_word(value, kind) for value, kind in zip(arguments, ARGUMENTS[name], strict=True)]
        padding = [0] * (_MAX_ARGUMENTS - len(words))
        self.calls.append([list(OPERATIONS).index(name), rows_at, *words, *padding])
        self.names.append(name)
        return True


def _word(value: int | float | None, kind: type) -> int:
    """An argument as the integer that `program.cpp` reads."""
    if kind is ctypes.c_float:
        return int(struct.unpack("<i", struct.pack("<f", value))[0])
    return 0 if value is None else int(value)


class _Buffers(TorchFunctionMode):
    """Gives out the memory that operators ask torch for, and refuses what torch itself would compute: a run
    would not. Left are views and questions about a tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[Tensor] = []  # all there is
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)  # by bytes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.empty:
            shape = args if isinstance(args[0], int) else args[0]
            return self._buffer(tuple(shape), options.get("dtype") or torch.get_default_dtype())
        if func is torch.empty_like:
            return self._buffer(tuple(args[0].shape), options.get("dtype") or args[0].dtype)
        answer = None if _writes(func.__name__, options) else func(*args, **options)
        parts = answer if isinstance(answer, tuple | list) else (answer,)
        if answer is None or not all(_is_view(part, args[0]) for part in parts if isinstance(part, Tensor)):
            raise NotRecordable(f"torch's {func.__name__} cannot be a part of a program.")
        return answer

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        free = self._free[size]
        if not free:
            free.append(torch.empty(size, dtype=torch.uint8))
            self.memory.append(free[-1])
        memory = free.pop()
        # An array of its own for each loan: it lives as long as the storage of the tensor lent.
        lent = memory.numpy()[:]
        weakref.finalize(lent, free.append, memory)
        return torch.from_numpy(lent).view(dtype).view(shape)


def _writes(name: str, options: dict[str, Any]) -> bool:
    """Whether a torch function of this name changes a tensor: `add_`, `__setitem__`, `__iadd__`, or any `out`."""
    if name.startswith("__"):
        return name.startswith(("__set", "__i")) and name not in ("__index__", "__int__", "__invert__")
    return name.endswith("_") or options.get("out") is not None


def _is_view(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
