"""What may decide a row's bits: nothing but the row, which is the default, or also what is fastest for a batch.

Chosen once a process, before its first operator (`start_gpu`). Operators ask `in_force`; every choice that
may change a bit with the batch is a field here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mode:
    """`splits_products`: the library may cut K in parts, by the number of rows. `sums_single_rows`: products of one
    row are plain sums (`kernels.gpu.vector`). `chunk_split`: positions in a split of the context of a chunk's query,
    None being the contract's.
    """

    splits_products: bool
    sums_single_rows: bool
    chunk_split: int | None


REPRODUCIBLE = Mode(splits_products=False, sums_single_rows=False, chunk_split=None)

#: The fastest known set on an H200; `kernels/NOTES.md` has what each part brings. No context is longer than the
#: split of a chunk, whose kernel then has nothing to merge.
FASTEST = Mode(splits_products=True, sums_single_rows=True, chunk_split=2**20)

_chosen = REPRODUCIBLE


def choose(mode: Mode) -> None:
    """From now on, for all devices of this process."""
    global _chosen
    _chosen = mode


def in_force() -> Mode:
    return _chosen
