"""What the host knows of the rows of a GPU's step. Ids and logprobs are in `test_gpu_runner.py`, on a GPU."""

from __future__ import annotations

from array import array

import pytest
import torch

from engine.device.gpu_sampler import GpuSampler
from engine.device.staging import Layout, Staging
from engine.plan import SlotState
from protocol.messages import U32
from protocol.sampling import SamplingParams


@pytest.fixture
def sampler() -> GpuSampler:
    return GpuSampler(4, 100, torch.device("cpu"))


def enter(sampler: GpuSampler, slot: int, sampling: SamplingParams, masked: tuple[int, ...] = ()) -> None:
    sampler.enter(SlotState(slot, array(U32, [1, 2, 3]), array(U32), sampling, 7, masked))


def is_plain(sampler: GpuSampler, *rows: tuple[int, int]) -> bool:
    """Of rows given as (slot, place)."""
    return sampler.is_plain([slot for slot, _ in rows], [place for _, place in rows])


def test_parameters_of_rows_are_those_of_their_slots(sampler: GpuSampler) -> None:
    states = {
        3: (-(2**63) + 5, SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.05)),
        1: (2**40 + 1, SamplingParams(temperature=0.0, top_k=-1)),
    }
    for slot, (seed, sampling) in states.items():
        sampler.enter(SlotState(slot, array(U32, [1]), array(U32), sampling, seed))
    layout, staging = Layout(4, 4), Staging(Layout(4, 4), depth=1, device=torch.device("cpu"))
    sampler.fill_rows(staging.host(layout), [3, 1, 3])
    sampler.fill_rows(staging.host(layout), [])
    staging.send(layout)
    columns = staging.device(layout)
    assert columns.seeds.view(torch.int64).tolist() == [states[3][0], states[1][0], states[3][0], 0]
    assert columns.top_k.tolist() == [50, 0, 50, 0]
    floats = (columns.temperature, [0.7, 0, 0.7]), (columns.top_p, [0.9, 1, 0.9]), (columns.min_p, [0.05, 0, 0.05])
    for column, values in floats:
        assert column.view(torch.float32).equal(torch.tensor([*values, 0.0]))


def test_rows_with_logprobs_are_never_plain(sampler: GpuSampler) -> None:
    enter(sampler, 0, SamplingParams())
    enter(sampler, 2, SamplingParams(logprobs=0))
    assert is_plain(sampler, (0, 3))
    assert not is_plain(sampler, (0, 3), (2, 10_000))
    enter(sampler, 2, SamplingParams())
    assert is_plain(sampler, (0, 3), (2, 3))
    assert is_plain(sampler)


def test_rows_are_plain_once_min_tokens_are_there(sampler: GpuSampler) -> None:
    enter(sampler, 1, SamplingParams(min_tokens=2), masked=(5,))
    # The prompt has three tokens: those at places 3 and 4 must not end it.
    assert [is_plain(sampler, (1, place)) for place in (3, 4, 5)] == [False, False, True]
    enter(sampler, 1, SamplingParams(min_tokens=2, ignore_eos=True))
    assert is_plain(sampler, (1, 3)), "nothing is masked"
