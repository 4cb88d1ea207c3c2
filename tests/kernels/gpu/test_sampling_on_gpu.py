"""Noise, sampling and logprobs on a GPU against those of the CPU. `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch

import kernels
from tests.kernels.gpu.sampling_cases import HardRows, noise_and_bound

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def cuda() -> torch.device:
    device = torch.device("cuda", 0)
    kernels.start_gpu(device, torch.bfloat16)
    return device


def test_noise_has_the_bits_of_the_cpu(cuda: torch.device) -> None:
    from kernels.gpu.noise import gumbel_noise

    seeds = torch.tensor([1, -5, 2**62 + 12345678901, 0])
    places = torch.tensor([0, 7, 123456, 2**31 - 1])
    kernels.start(kernels.Implementation.NATIVE)
    wanted = kernels.gumbel_noise(seeds, places, 200_000)
    assert torch.equal(gumbel_noise(seeds.to(cuda), places.to(cuda), 200_000).cpu(), wanted)


def test_sampling_picks_what_the_cpu_picks(cuda: torch.device) -> None:
    rows, vocab = 96, 50_000
    logits = torch.randn(rows, vocab) * 2
    logits[:8] = logits[:8].round()
    number = torch.arange(rows)
    temperature = torch.where(number % 5 == 0, 0.0, 0.7)
    top_k, top_p = (number % 3 == 1) * 40, torch.where(number % 4 == 1, 0.9, 1.0)
    min_p = torch.where(number % 7 == 3, 0.05, 0.0)
    last = torch.zeros(rows, dtype=torch.int32, device=cuda)
    differ = 0
    for turn in range(5):
        seeds = number * 1234567 + turn
        wanted = kernels.sample(logits, temperature, top_k, top_p, min_p, seeds, number)
        columns = (temperature, top_k.int(), top_p, min_p, seeds, number.int(), number.int())
        found = kernels.sample_ahead(logits.to(cuda), *(column.to(cuda) for column in columns), last).cpu()
        assert torch.equal(found, last.cpu())
        differ += int((found != wanted).sum())
    # A nucleus' edge may fall between two tokens by the rounding of its sum.
    assert differ <= 1


@pytest.mark.parametrize("vocab", [1000, 128_256, 151_936])
def test_sampling_of_hard_rows(cuda: torch.device, vocab: int) -> None:
    rows = HardRows.draw(vocab)
    number = torch.arange(len(rows.logits))
    last = torch.zeros(len(number), dtype=torch.int32, device=cuda)
    kernels.start(kernels.Implementation.NATIVE)
    for turn in range(3):
        columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, number * 7919 + turn, number)
        wanted = kernels.sample(rows.logits, *columns)
        columns = (rows.temperature, rows.top_k.int(), rows.top_p, rows.min_p, number * 7919 + turn, number.int())
        found = kernels.sample_ahead(rows.logits.to(cuda), *(c.to(cuda) for c in (*columns, number.int())), last)
        assert found.cpu().clamp(min=-1).tolist() == wanted.tolist()


def test_no_noise_is_above_its_bound(cuda: torch.device) -> None:
    """For all words there are: the lowest 8 bits do not matter."""
    drawn, bound = noise_and_bound(torch.arange(2**24, device=cuda) << 8)
    assert bool((bound > drawn + 5e-5).all())
    assert float((bound - drawn)[(drawn > 3) & (drawn < 16.6)].max()) < 0.09


def test_logprobs(cuda: torch.device) -> None:
    logits = torch.randn(7, 50_000) * 3
    logits[2] = logits[2].round()
    ids = torch.arange(7) * 11
    wanted = kernels.logprobs(logits, ids, 20)
    own, rank, top_ids, top = (t.cpu() for t in kernels.logprobs_ahead(logits.to(cuda), ids.int().to(cuda), 20))
    torch.testing.assert_close(own, wanted.own, rtol=0, atol=2e-5)
    torch.testing.assert_close(top, wanted.top, rtol=0, atol=2e-5)
    assert torch.equal(rank.long(), wanted.rank)
    assert torch.equal(top_ids.long(), wanted.top_ids)
