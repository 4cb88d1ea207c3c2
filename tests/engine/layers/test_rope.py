"""Every kind of rotary positions against transformers' own functions, at lengths where they change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.layers.rope import DynamicRope, LinearRope, Rope, SteppedRope, rope_table
from engine.models.config import ConfigFields
from engine.models.rope import read_rope
from tests.engine.family_models import ROPE_LENGTHS, VARIANTS

HEAD_DIM = 16

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.rope])
def test_frequencies_are_those_of_transformers(family_models: Path, name: str) -> None:
    golden = json.loads((family_models / "golden.json").read_text())[name]["rope"]
    config = ConfigFields(json.loads((family_models / name / "config.json").read_text()))
    choice = read_rope(config, head_dim=HEAD_DIM, max_positions=640, partial=VARIANTS[name].family == "Phi3")
    rope, turned = choice.rope, choice.rotary_dim
    for length, (magnitude, *frequencies) in zip(ROPE_LENGTHS, golden, strict=True):
        assert rope.magnitude == magnitude
        torch.testing.assert_close(rope.frequencies(turned, length), torch.tensor(frequencies), rtol=2e-7, atol=0)


def test_a_table_holds_cosines_then_sines() -> None:
    table = rope_table(LinearRope(theta=100.0, factor=2.0, magnitude=3.0), 5, 4)
    angles = torch.arange(5.0)[:, None] * torch.tensor([0.5, 0.05])
    torch.testing.assert_close(table, 3 * torch.cat((angles.cos(), angles.sin()), dim=1))


def test_equal_ropes_are_equal_values_and_kinds_are_not() -> None:
    assert {Rope(theta=1e4), Rope(theta=1e4)} == {Rope(theta=1e4)}
    assert LinearRope(theta=1e4, factor=1.0) != Rope(theta=1e4)


def test_a_dynamic_rope_is_plain_in_the_trained_context() -> None:
    rope = DynamicRope(theta=1e4, factor=4.0, trained_positions=100)
    assert torch.equal(rope_table(rope, 100, 8), rope_table(Rope(theta=1e4), 100, 8))
    assert not torch.equal(rope_table(rope, 101, 8)[:100], rope_table(rope, 100, 8))


@pytest.mark.parametrize(("length", "alpha"), [(1, 1), (100, 1), (101, 3), (200, 3), (201, 7), (400, 7), (401, 15)])
def test_a_stepped_rope_has_a_base_for_each_doubling(length: int, alpha: int) -> None:
    rope = SteppedRope(theta=1e4, trained_positions=100)
    plain = Rope(theta=1e4 * alpha ** (8 / 6))
    assert torch.equal(rope.frequencies(8, length), plain.frequencies(8, length))
    assert (rope.regime(length) == 0) == (alpha == 1)
