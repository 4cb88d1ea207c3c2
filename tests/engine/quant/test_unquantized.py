from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

import kernels
from engine.loading.formats import Region
from engine.loading.weights import DummyWeights
from engine.quant import ExpertParts, LinearPart
from engine.quant.unquantized import Unquantized

#: The first layer of a session may have to build the kernels.
pytestmark = pytest.mark.timeout(300)


class CountingWeights(DummyWeights):
    """Knows how many of the tensors it gave out are still there."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16, torch.device("cpu"))
        self.most = 0
        self._given: list[weakref.ref[Tensor]] = []

    def take(self, name: str, shape: tuple[int, ...], region: Region | None = None) -> Tensor:
        tensor = super().take(name, shape, region)
        self._given.append(weakref.ref(tensor))
        self.most = max(self.most, sum(given() is not None for given in self._given))
        return tensor


def test_experts_are_read_one_at_a_time_into_their_place() -> None:
    experts = [
        ExpertParts(LinearPart(f"gate{n}", 20, 36), LinearPart(f"up{n}", 20, 36), LinearPart(f"down{n}", 36, 20))
        for n in range(5)
    ]
    reader = CountingWeights()
    packed = Unquantized().load_experts(reader, experts).packed
    assert reader.most == 3, "no more than the matrices of one expert beside the packed ones"
    assert packed.dtype is torch.bfloat16
    x, one = torch.randn(4, 36).bfloat16(), torch.ones(4, 1)
    for number, expert in enumerate(experts):
        found = kernels.mix_experts(x, torch.full((4, 1), number, dtype=torch.int32), one, packed)
        gated = Unquantized().load(reader, [expert.gate, expert.up]).gated_product(x, None, kernels.Activation.SILU)
        assert torch.equal(found, Unquantized().load(reader, [expert.down]).product(gated, None))
