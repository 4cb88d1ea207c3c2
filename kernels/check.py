"""The check made at every start: a row's bits do not depend on the batch."""

from __future__ import annotations

import torch

from kernels.matmul import linear, pack_linear

#: (out, in): a multiple of every tile, and a shape with remainders in both directions.
_SHAPES = ((256, 192), (100, 331))
_ROW_COUNTS = (1, 3, 8, 17)


def self_check() -> None:
    """Raise RuntimeError, naming the shape, if a row of a matrix product changes with the rows beside it."""
    generator = torch.Generator().manual_seed(1)
    for num_out, num_in in _SHAPES:
        packed = pack_linear(torch.randn(num_out, num_in, generator=generator))
        x = torch.randn(max(_ROW_COUNTS), num_in, generator=generator)
        whole = linear(x, packed)
        for count in _ROW_COUNTS:
            if not torch.equal(linear(x[-count:], packed), whole[-count:]):
                raise RuntimeError(
                    f"the matrix product on this machine gives a row other bits in a batch of {count} than in one "
                    f"of {max(_ROW_COUNTS)} (weight {num_out} x {num_in}); output would not be reproducible."
                )
