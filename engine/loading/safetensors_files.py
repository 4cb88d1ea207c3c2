"""safetensors: bytes go from the file straight into the tensor's memory.

Not through a mapping of the file: the system would count its pages as ours, fetch them in small pieces, and end
the process (SIGBUS) where the file is cut meanwhile.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from engine.loading.formats import Region, read_header, tensors_with_starts
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

#: A larger one is read in parts of this size, by up to so many threads.
_PART_BYTES, _MOST_THREADS = 8 * 2**20, 4

#: What the system is asked to fetch behind a tensor that is read, so that the disk works while it is put into place.
_READ_AHEAD_BYTES = 64 * 2**20


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
        memory = _memory(math.prod(shape) * dtype.itemsize)
        try:
            starts = [start + dtype.itemsize * first for first in _runs(entry.shape, region)]
            self._read_into(memoryview(memory), starts)
        except OSError as error:
            raise ModelError(f"{self._file} cannot be read: {error.strerror}.") from error
        return torch.frombuffer(memory, dtype=dtype).view(shape) if memory else torch.empty(shape, dtype=dtype)

    def header(self) -> bytes:
        return read_header(self._file)

    def _read_into(self, memory: memoryview, starts: Sequence[int]) -> None:
        """Fill `memory` with runs of equal length from `starts` on. By several threads: half of the time goes into
        making pages and copying into them.
        """
        length = len(memory) // len(starts)
        parts = [
            (memory[run * length + begin : run * length + min(begin + _PART_BYTES, length)], start + begin)
            for run, start in enumerate(starts)
            for begin in range(0, length, _PART_BYTES)
        ]
        ahead = starts[-1] - starts[0] + length + _READ_AHEAD_BYTES
        num_threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)), -(-len(memory) // _PART_BYTES))
        with self._file.open("rb", buffering=0) as stream:
            descriptor = stream.fileno()
            os.posix_fadvise(descriptor, starts[0], ahead, os.POSIX_FADV_WILLNEED)
            if num_threads <= 1:
                return self._read_parts(descriptor, parts)
            with ThreadPoolExecutor(num_threads) as threads:
                shares = [parts[number::num_threads] for number in range(num_threads)]
                for reading in [threads.submit(self._read_parts, descriptor, share) for share in shares]:
                    reading.result()

    def _read_parts(self, descriptor: int, parts: Sequence[tuple[memoryview, int]]) -> None:
        for memory, start in parts:
            done = 0
            while done < len(memory):
                count = os.preadv(descriptor, [memory[done:]], start + done)
                if count == 0:
                    raise ModelError(f"{self._file} was cut while it was read. Fetch the file again.")
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
