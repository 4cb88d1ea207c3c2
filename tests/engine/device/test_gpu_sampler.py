"""What the host knows of the rows of a GPU's step. Ids and logprobs are in `test_gpu_runner.py`, on a GPU."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from engine.device.gpu_sampler import GpuSampler
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
    slots, places = np.array(rows, np.int64).reshape(-1, 2).T
    return sampler.is_plain(slots, places)


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
