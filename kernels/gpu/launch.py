"""How kernels are launched: programmatic dependent launch, and what the device offers.

On compute capability 9.0 and later a kernel may begin while the one before it still runs. Every kernel here lets its
successor begin at once (`begin`), and waits (`wait`) before it reads anything that a kernel of the same step writes.
Before the wait it reads only weights, what the host sent for the step (positions, tiles, items), block tables, and, in
`early`, keys and values of earlier steps. What copies and earlier steps wrote is there: a step's first kernel
(`embedding`) begins when they are done, and lets its successor begin when it has changed the tables. Measured on an
H200 dependent launch saves 0.2 ms of a 4.4 ms step.

A product and a sum are one rounding where a kernel says `fma`, and two elsewhere: what the compiler would join depends
on the code around it, and two kernels of one contract would differ (float32 attention of short and of long chunks did).

Row strides are left to Triton's specialization: unless it knows that 16 divides them, it cannot load
vectors, and a decode step of an 8B model takes 7.0 ms instead of 4.4.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from kernels._triton import tl, triton


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the next kernel of the stream begin."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def publish(PDL: tl.constexpr):
    """What the program has stored can be read by all that begins later, also before it waits. For a kernel that has
    let nothing begin yet."""
    if PDL:
        # By each thread for its own stores; then by all, since the first thread's `begin` counts for its program.
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.u32 $0, $1;", "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until the kernel before this one is done and its writes can be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@dataclass(frozen=True, slots=True)
class Limits:
    """What launches are fitted to. `dependent` says whether kernels may overlap, `warpgroups` whether products of four
    warps can be written as such: capability 9.0, and the Triton whose experimental language `kernels._gluon` is.
    """

    num_sms: int
    shared_memory: int  # bytes of a block
    dependent: bool
    warpgroups: bool = False

    @property
    def options(self) -> dict[str, bool]:
        """Options of every launch, but for that of a step's first kernel (`embedding`)."""
        return {"enable_fp_fusion": False} | ({"launch_pdl": True} if self.dependent else {})


@functools.cache
def limits(device: torch.device) -> Limits:
    """Of `device`; a CPU stands for Triton's interpreter, which has no limits."""
    if device.type == "cpu":
        return Limits(num_sms=1, shared_memory=1 << 30, dependent=False)
    properties = torch.cuda.get_device_properties(device)
    return Limits(
        num_sms=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,
        dependent=properties.major >= 9,
        warpgroups=properties.major == 9 and triton.__version__.startswith("3.6."),
    )
