"""Experts that transformers 5 stacked, taken apart again.

In memory it holds those of a layer as two tensors: `experts.gate_up_proj` [experts, 2 * inner, hidden] and
`experts.down_proj` [experts, hidden, inner]. `save_pretrained` writes a tensor a matrix, as checkpoints always had
it, but with `save_original_format=False` what it holds. An expert's matrices lie in one piece in either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.loading.formats import TensorEntry

#: Ending of a stacked tensor to the matrices of an expert in it, one below the other.
_STACKED = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}


def apart(tensors: Mapping[str, tuple[TensorEntry, int]]) -> dict[str, tuple[TensorEntry, int]]:
    """`tensors` with the byte of the file at which each begins, stacked ones replaced by `experts.N.gate_proj.weight`
    and so on, [inner, hidden].
    """
    found: dict[str, tuple[TensorEntry, int]] = {}
    for name, (entry, start) in tensors.items():
        ending = next((ending for ending in _STACKED if name.endswith(ending)), None)
        if ending is None or not _is_stack(entry, len(_STACKED[ending])):
            found[name] = entry, start
        else:
            found |= _matrices(name.removesuffix(ending) + ".experts", entry, start, _STACKED[ending])
    return found


def _is_stack(entry: TensorEntry, parts: int) -> bool:
    shape = entry.shape
    return len(shape) == 3 and min(shape) > 0 and shape[1] % parts == 0 and entry.num_bytes % (shape[0] * parts) == 0


def _matrices(
    prefix: str, entry: TensorEntry, start: int, parts: tuple[str, ...]
) -> Iterator[tuple[str, tuple[TensorEntry, int]]]:
    num_experts, rows, columns = entry.shape
    num_bytes = entry.num_bytes // (num_experts * len(parts))
    matrix = replace(entry, shape=(rows // len(parts), columns), num_bytes=num_bytes)
    for expert in range(num_experts):
        for part in parts:
            yield f"{prefix}.{expert}.{part}.weight", (matrix, start)
            start += num_bytes
