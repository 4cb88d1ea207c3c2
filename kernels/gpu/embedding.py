"""Token embeddings, where an id may be one that only the device knows yet."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._triton import tl, triton
from kernels.gpu.launch import begin, limits


@triton.jit
def embed_kernel(ids_ptr, last_ids_ptr, weight_ptr, y_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A step's first kernel. It begins when all before it is done (no `launch_pdl`), so that those after it may read
    before they wait what the host and earlier steps have written."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + row)
    token = tl.load(last_ids_ptr + (-1 - token), mask=token < 0, other=token).to(tl.int64)
    value = tl.load(weight_ptr + token * WIDTH + column, mask=column < WIDTH, other=0.0)
    tl.store(y_ptr + row * WIDTH + column, value.to(y_ptr.dtype.element_ty), mask=column < WIDTH)


def embed_ahead(ids: Tensor, last_ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of `weight` [V, H] for int32 `ids` [M]: [M, H] in `dtype`.

    An id below 0 stands for last_ids[-1 - id], int32 [num_slots]: what was sampled last for a slot.
    """
    y = torch.empty(ids.shape[0], weight.shape[1], dtype=dtype, device=weight.device)
    if y.shape[0] == 0:
        return y
    limit = limits(weight.device)
    embed_kernel[(y.shape[0],)](
        *(ids, last_ids, weight, y),
        WIDTH=y.shape[1],
        BLOCK=triton.next_power_of_2(y.shape[1]),
        PDL=limit.dependent,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return y
