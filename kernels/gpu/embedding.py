"""A step's beginning: changes to block tables, and token embeddings, where an id may be one that only the device knows.

The tables are changed here because a launch of its own cost the host 0.2 ms of a prompt's first token, and the device
10 us between two steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._triton import tl, triton
from kernels.gpu.launch import begin, limits, publish
from kernels.step_start import StepStart

#: Changes that a program makes at a time: those of a cached prompt of 8,192 tokens, whose last token is the only row.
_CHANGES = 512


@triton.jit
def make_changes(num_changes_ptr, changes_ptr, cells_ptr, CHANGES: tl.constexpr, PDL: tl.constexpr):
    """This program's share. Kernels of the step read tables before they wait: they begin when it is made."""
    count = tl.load(num_changes_ptr)
    first = tl.program_id(0) * CHANGES
    for at in range(first, count, tl.num_programs(0) * CHANGES):
        index = at + tl.arange(0, CHANGES)
        inside = index < count
        cell = tl.load(changes_ptr + index, mask=inside, other=0)
        value = tl.load(changes_ptr + count + index, mask=inside, other=0)
        tl.store(cells_ptr + cell, value, mask=inside)
    if first < count:
        publish(PDL)


@triton.jit
def embed_kernel(
    ids_ptr,
    last_ids_ptr,
    weight_ptr,
    num_changes_ptr,
    changes_ptr,
    cells_ptr,
    y_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A step's first kernel. It begins when all before it is done (no `launch_pdl`), so that those after it may read
    before they wait what the host and earlier steps have written."""
    make_changes(num_changes_ptr, changes_ptr, cells_ptr, CHANGES, PDL)
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + row)
    token = tl.load(last_ids_ptr + (-1 - token), mask=token < 0, other=token).to(tl.int64)
    value = tl.load(weight_ptr + token * WIDTH + column, mask=column < WIDTH, other=0.0)
    tl.store(y_ptr + row * WIDTH + column, value.to(y_ptr.dtype.element_ty), mask=column < WIDTH)


def embed_ahead(ids: Tensor, start: StepStart, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of `weight` [V, H] for int32 `ids` [M], M at least 1: [M, H] in `dtype`. Makes the changes first.

    An id below 0 stands for start.last_ids[-1 - id].
    """
    y = torch.empty(ids.shape[0], weight.shape[1], dtype=dtype, device=weight.device)
    limit = limits(weight.device)
    embed_kernel[(y.shape[0],)](
        *(ids, start.last_ids, weight, start.num_changes, start.changes, start.cells, y),
        WIDTH=y.shape[1],
        BLOCK=triton.next_power_of_2(y.shape[1]),
        CHANGES=_CHANGES,
        PDL=limit.dependent,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return y
