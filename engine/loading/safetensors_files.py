"""safetensors: bytes go from the file straight into the tensor's memory.

Not through a mapping of the file: the system would count its pages as ours, fetch them in small pieces, and end
the process (SIGBUS) where the file is cut meanwhile.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from engine.loading.formats import Extent, Region, read_header, tensors_with_starts
from engine.loading.store import ModelError

#: The format's names of types.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

#: Tensors from this size on have mappings of their own.
_MAPPED_BYTES = 2**20

#: What the disk is asked for at a call. The kernel takes some MB at most, by the disk's settings.
_PIECE_BYTES = 2 * 2**20


def _memory(num_bytes: int) -> bytearray | mmap.mmap:
    """Where a tensor lies. A large one has a mapping of its own, gone with it: the allocator kept 370 MB of what
    was freed while a model of 970 MB was loaded. In huge pages it is filled in half the time.
    """
    if num_bytes < _MAPPED_BYTES:
        return bytearray(num_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class SafetensorsFile:
    """One file, its header checked against its size. Raises ModelError."""

    def __init__(self, file: Path) -> None:
        self._file = file
        found = tensors_with_starts(file)
        self.entries = {name: entry for name, (entry, _) in found.items()}
        self._starts = {name: start for name, (_, start) in found.items()}

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """The tensor `name`, or of a matrix or vector a part alone. Raises ModelError when it cannot be read, or is of
        a type that torch has not.
        """
        dtype, shape, starts = self._found(name, region)
        memory = _memory(math.prod(shape) * dtype.itemsize)
        try:
            self._read_into(memoryview(memory), starts)
        except OSError as error:
            raise ModelError(f"{self._file} cannot be read: {error.strerror}.") from error
        return torch.frombuffer(memory, dtype=dtype).view(shape) if memory else torch.empty(shape, dtype=dtype)

    def extent(self, name: str, region: Region | None = None) -> Extent | None:
        """Where the file holds what `read` answers; None unless it does so in one piece. Raises ModelError for a type
        that torch has not.
        """
        _, shape, starts = self._found(name, region)
        return Extent(self._file, starts[0], self.entries[name].dtype, shape) if len(starts) == 1 else None

    def header(self) -> bytes:
        return read_header(self._file)

    def _found(self, name: str, region: Region | None) -> tuple[torch.dtype, tuple[int, ...], Sequence[int]]:
        """Type and shape of a tensor or a part of it, and the bytes of the file at which its runs begin."""
        entry, start = self.entries[name], self._starts[name]
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise ModelError(f"{self._file}: {name} is {entry.dtype}; supported are {', '.join(DTYPES)}.")
        if math.prod(entry.shape) * dtype.itemsize != entry.num_bytes:
            raise ModelError(
                f"{self._file} has a malformed safetensors header: {name}, {entry.dtype} {list(entry.shape)}, has "
                f"{entry.num_bytes} bytes."
            )
        shape = entry.shape if region is None else tuple(len(part) for part in region)
        return dtype, shape, [start + dtype.itemsize * first for first in _runs(entry.shape, region)]

    def _read_into(self, memory: memoryview, starts: Sequence[int]) -> None:
        """Fill `memory` with runs of equal length from `starts` on.

        The disk is asked for all of a long run at once, piece by piece since it takes no more at a call: 970 MB of a
        model in 1.9 s, without it 2.4 s (two cores). Reading by several threads was slower, as was a thread that
        reads ahead of what is taken; to ask for what follows as well made no difference.
        """
        length = len(memory) // len(starts)
        with self._file.open("rb", buffering=0) as stream:
            for number, start in enumerate(starts):
                for piece in range(start, start + length, _PIECE_BYTES) if length > _PIECE_BYTES else ():
                    os.posix_fadvise(stream.fileno(), piece, _PIECE_BYTES, os.POSIX_FADV_WILLNEED)
                fill(memory[number * length : (number + 1) * length], self._file, stream.fileno(), start)


def fill(memory: memoryview, path: Path, file: int, start: int) -> None:
    """Read what lies in the open `file` from `start` on. Raises ModelError when it ends too early, or OSError."""
    done = 0
    while done < len(memory):
        count = os.preadv(file, [memory[done:]], start + done)
        if count == 0:
            raise ModelError(f"{path} was cut while it was read. Fetch the file again.")
        done += count


def _runs(shape: tuple[int, ...], region: Region | None) -> Sequence[int]:
    """The first element of each run of elements that a region has in one piece: all of it, or its part of a row."""
    if region is None:
        return [0]
    if len(region) == 1:
        return [region[0].start]
    rows, columns = region
    if len(columns) == shape[1]:
        return [rows.start * shape[1]]
    return [row * shape[1] + columns.start for row in rows]
