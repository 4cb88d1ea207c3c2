from __future__ import annotations

import ctypes
from pathlib import Path

from engine.heap import LEAST_REJECTED, Heap


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def test_holes_are_given_back_once_a_burst_is_over() -> None:
    trims = []
    heap = Heap(lambda: trims.append(None))
    heap.tick(LEAST_REJECTED - 1)
    heap.tick(LEAST_REJECTED - 1)
    assert not trims, "so few are not worth it"
    heap.tick(LEAST_REJECTED)
    assert not trims, "they still come"
    heap.tick(LEAST_REJECTED)
    heap.tick(LEAST_REJECTED)
    assert len(trims) == 1
    heap.tick(2 * LEAST_REJECTED - 1)
    heap.tick(2 * LEAST_REJECTED - 1)
    assert len(trims) == 1, "few since the last time"


def test_what_lies_under_a_live_allocation_goes_back_to_the_system() -> None:
    malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
    malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    heap = Heap()
    pieces = [malloc(16_000) for _ in range(4_000)]
    for piece in pieces:
        ctypes.memset(piece, 1, 16_000)
    for piece in pieces[:-1]:
        free(piece)
    before = resident_mib()
    heap.tick(LEAST_REJECTED)
    heap.tick(LEAST_REJECTED)
    free(pieces[-1])
    assert before - resident_mib() > 40  # of 61
