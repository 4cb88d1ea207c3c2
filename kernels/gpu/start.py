"""Once a process: how the library's products are asked for, where compiled kernels are kept, and the check
that a row's bits do not depend on the batch here, nor on what of the library's is asked for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels._triton import triton
from kernels.gpu import library, mode
from kernels.gpu.compiling import compile_ahead
from kernels.gpu.cublaslt import Algorithm
from kernels.gpu.matmul import LEAST_HEAD
from kernels.gpu.products import gated_linear, linear

log = logging.getLogger(__name__)

#: Raised whenever an operator on a GPU may change a bit of its result.
GPU_NUMERICS = 3

#: (out, in): small weights, a multiple of every tile and one with remainders; and a large one, as 8B models have.
_SHAPES = ((512, 2048), (1000, 1544), (6144, 4096))
_ROW_COUNTS = (1, 20, 50, 100)
_MOST_ROWS = 300

#: The smallest head that may go to the library, and numbers of rows it is asked for.
_HEAD = (LEAST_HEAD, 4096)
_HEAD_ROWS = (129, 200, _MOST_ROWS)


def start_gpu(
    device: torch.device, dtype: torch.dtype, cache_dir: Path | None = None, *, reproducible: bool = True
) -> None:
    """Prepare `device` for models of `dtype`; `cache_dir` keeps compiled kernels from one start to the next.

    Raises RuntimeError for a device that is too old, or, if they are to be, whose products are not `reproducible`.
    """
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise RuntimeError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; 8.0 or later is needed."
        )
    if cache_dir is not None:
        triton.knobs.cache.dir = str(cache_dir / "triton")
    chosen = mode.REPRODUCIBLE if reproducible else mode.FASTEST
    mode.choose(chosen)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    # The second value is about split-K, whose choice depends on the number of rows.
    allowed = (chosen.splits_products, chosen.splits_products)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = allowed
    sixteen_bits = dtype.itemsize == 2
    library.allow(dtype, library.Allowed(float32_results=sixteen_bits and not reproducible))
    if not reproducible:
        return
    products = [_Products.draw(device, dtype, *shape) for shape in _SHAPES]
    heads = [_Products.draw(device, dtype, *_HEAD)] if sixteen_bits else []

    def launch_all() -> None:
        for each in products:
            for count in (*_ROW_COUNTS, _MOST_ROWS):
                each.of_last(count)
        for head in heads:
            linear(head.x, head.weight, None, torch.float32)

    compile_ahead(launch_all)
    for each in products:
        each.check()
    for head in heads:
        library.allow(dtype, _allowed(products, head))


def gpu_numerics_name(device: torch.device) -> str:
    """What decides the bits of results on `device`. Part of the numerics hash."""
    capability = "".join(map(str, torch.cuda.get_device_capability(device)))
    return f"triton-{GPU_NUMERICS} triton-{triton.__version__} cuda-{torch.version.cuda} sm_{capability}"


@dataclass(frozen=True, slots=True, eq=False)
class _Products:
    """What is multiplied for the check of one shape."""

    x: Tensor
    weight: Tensor

    @classmethod
    def draw(cls, device: torch.device, dtype: torch.dtype, num_out: int, num_in: int) -> _Products:
        generator = torch.Generator(device).manual_seed(1)
        weight = torch.randn(num_out, num_in, generator=generator, device=device).to(dtype)
        return cls(torch.randn(_MOST_ROWS, num_in, generator=generator, device=device).to(dtype), weight)

    def of_last(self, count: int) -> tuple[Tensor, ...]:
        """The kinds of product of the last `count` rows."""
        x = self.x[-count:]
        kinds = dict.fromkeys((x.dtype, torch.float32))
        return *(linear(x, self.weight, None, kind) for kind in kinds), gated_linear(x, self.weight, None)

    def check(self) -> None:
        whole = self.of_last(_MOST_ROWS)
        for count in _ROW_COUNTS:
            if not all(torch.equal(some, all_[-count:]) for some, all_ in zip(self.of_last(count), whole, strict=True)):
                num_out, num_in = self.weight.shape
                raise RuntimeError(
                    f"the matrix product on {torch.cuda.get_device_name(self.x.device)} gives a row other bits in a "
                    f"batch of {count} than in one of {_MOST_ROWS} (weight {num_out} x {num_in}, {self.x.dtype}); "
                    f"output would not be reproducible."
                )

    def are_same_by(self, algorithm: Algorithm) -> bool:
        """Whether an algorithm of ours has the bits of torch's product."""
        found = library.multiply_by(algorithm, self.x, self.weight)
        return found is not None and torch.equal(found, linear(self.x, self.weight, None, self.x.dtype))

    def are_same_to_float32(self) -> bool:
        """Whether the library's float32 results have the bits of the tiles, which `linear` takes until they do."""
        whole = linear(self.x, self.weight, None, torch.float32)
        found = (library.multiply(self.x[-count:], self.weight, torch.float32) for count in _HEAD_ROWS)
        return all(torch.equal(some, whole[-len(some) :]) for some in found)


def _allowed(products: Sequence[_Products], head: _Products) -> library.Allowed:
    """What of the library's has the bits of the tiles and of torch's products."""
    allowed = library.Allowed(
        float32_results=head.are_same_to_float32(),
        algorithms=tuple(way for way in library.ALGORITHMS if all(each.are_same_by(way) for each in products)),
    )
    # Nothing but speed is lost where it is less than it might be, which somebody may wonder about.
    log.info("gpu_library", extra={"float32_results": allowed.float32_results, "algorithms": len(allowed.algorithms)})
    return allowed
