"""Tensors from files into a GPU's memory, by several threads at a time.

A thread reads a piece of a tensor into page-locked memory, which the GPU copies from while the thread reads on
into the next. The memory is a ring, so that a load takes the same whatever the size of a model.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor

from engine.loading.formats import Extent
from engine.loading.safetensors_files import DTYPES, fill
from engine.loading.store import ModelError

#: What is read and copied at a time, by so many threads, each of which may be ahead by a piece: 128 MiB in all. From
#: the page cache to an H200 12.3 GB/s, with pieces of 4 MiB 9.4 to 11.5, of 2 MiB 6.7 (Python takes turns), with 16
#: threads 9.4; a tensor at a time, read and then copied, 1.7.
PIECE_BYTES = 8 * 2**20
THREADS = 8

#: Tensors below eight such pieces, as experts have them, are shared among fewer threads.
_LEAST_BYTES = 2**20


class Upload:
    """Its calls' tensors are complete for what is queued on the device after them. Close it when all are there."""

    def __init__(self, device: torch.device, *, piece_bytes: int = PIECE_BYTES, threads: int = THREADS) -> None:
        self._device = device
        self._piece_bytes, self._num_threads = piece_bytes, threads
        self._threads = ThreadPoolExecutor(threads, "upload")
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        for _ in range(2 * threads):
            self._free.put(_Buffer(piece_bytes, device))

    def __call__(self, extent: Extent) -> Tensor:
        """The tensor whose bytes lie in one piece in a file. Raises ModelError."""
        tensor = torch.empty(extent.shape, dtype=DTYPES[extent.dtype], device=self._device)
        target = tensor.view(-1).view(torch.uint8)
        # The copies follow what was queued before, whose memory the tensor may have.
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        try:
            with extent.file.open("rb", buffering=0) as file:
                size = min(self._piece_bytes, max(_LEAST_BYTES, -(-len(target) // self._num_threads)))
                piece = partial(self._piece, extent, file.fileno(), target, stream, size)
                for _ in self._threads.map(piece, range(0, len(target), size)):
                    pass
        except OSError as error:
            raise ModelError(f"{extent.file} cannot be read: {error.strerror}.") from error
        return tensor

    def close(self) -> None:
        """Let go of threads and memory, once the last copy is done."""
        self._threads.shutdown()
        while not self._free.empty():
            self._free.get().wait()

    def _piece(
        self, extent: Extent, file: int, target: Tensor, stream: torch.cuda.Stream | None, size: int, begin: int
    ) -> None:
        buffer = self._free.get()
        try:
            buffer.wait()
            part = target[begin : begin + size]
            os.posix_fadvise(file, extent.start + begin, len(part), os.POSIX_FADV_WILLNEED)
            fill(buffer.view[: len(part)], extent.file, file, extent.start + begin)
            buffer.copy_to(part, stream)
        finally:
            self._free.put(buffer)


class _Buffer:
    """A place in the ring: page-locked for a GPU."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self.view: memoryview = self._memory.numpy().data

    def wait(self) -> None:
        """Until the last copy out of it is done."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy_to(self, target: Tensor, stream: torch.cuda.Stream | None) -> None:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            target.copy_(self._memory[: len(target)], non_blocking=True)
        if self._copied is not None:
            self._copied.record(stream)
