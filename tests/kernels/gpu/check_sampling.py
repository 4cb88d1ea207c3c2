"""Noise and sampling against the references in Triton's interpreter; `test_interpreted` runs this file."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels.gpu import noise, sampling
from kernels.sampling import mask_logits
from tests.kernels.gpu.sampling_cases import HardRows, noise_and_bound

pytest_plugins = ("tests.kernels.gpu.interpreting",)

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.timeout(300)]


def test_noise() -> None:
    seeds, places = torch.tensor([1, -5, 2**62 + 12345678901]), torch.tensor([0, 7, 123456])
    found, wanted = noise.gumbel_noise(seeds, places, 300), kernels.gumbel_noise(seeds, places, 300)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)  # the interpreter's fma rounds twice


@pytest.mark.parametrize(("block", "turns"), [(8192, 3), (64, 1)])
def test_sampling(block: int, turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one block all values are held; of lanes of 5 values each, thresholds lie below what is held."""
    monkeypatch.setattr(sampling, "_THRESHOLD_BLOCK", block)
    rows, vocab = 20, 300
    logits = torch.randn(rows, vocab) * 3
    logits[8], logits[9, ::3], logits[10] = 1.0, 20.0, logits[10].round()
    logits[5, 7], logits[6, 9], logits[7] = torch.nan, torch.inf, -torch.inf
    number = torch.arange(rows)
    temperature = torch.where(number % 5 == 0, 0.0, 0.8)
    top_k, top_p, min_p = torch.zeros(rows, dtype=torch.int64), torch.ones(rows), torch.zeros(rows)
    top_k[8:14] = torch.tensor([5, 10, 3, 1, 40, 250])
    top_p[10:17] = torch.tensor([0.5, 1.0, 0.7, 0.1, 0.5, 0.9, 0.99])
    min_p[16:], min_p[12] = 0.05, 0.2
    last = torch.zeros(rows, dtype=torch.int32)
    for turn in range(turns):
        seeds = number * 123456789 + turn
        wanted = kernels.sample(logits, temperature, top_k, top_p, min_p, seeds, number)
        found = sampling.sample_ahead(
            logits, temperature, top_k.int(), top_p, min_p, seeds, number.int(), number.int(), last
        )
        assert found[5:8].tolist() == [sampling.NOT_FINITE, sampling.NOT_FINITE, sampling.NONE_ALLOWED]
        assert torch.equal(found.clamp(min=-1).long(), wanted)
        assert torch.equal(last, found.clamp(min=0))


def test_the_bound_of_noise() -> None:
    """For the least and the greatest words and some between; for all of them on a GPU."""
    numbers = torch.cat((torch.arange(16384), 2**24 - 1 - torch.arange(16384), torch.randint(2**24, (65536,))))
    for low in (0, 255):
        drawn, bound = noise_and_bound((numbers << 8) + low)
        assert bool((bound > drawn).all())
        assert float((bound - drawn)[(drawn > 3) & (drawn < 16.6)].max()) < 0.09


@pytest.mark.parametrize(("vocab", "part"), [(300, 64)])
def test_sampling_of_hard_rows(vocab: int, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_PART", part)
    rows = HardRows.draw(vocab)
    number = torch.arange(len(rows.logits))
    last = torch.zeros(len(number), dtype=torch.int32)
    columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, number * 7919, number + 3)
    wanted = kernels.sample(rows.logits, *columns)
    columns = (rows.temperature, rows.top_k.int(), rows.top_p, rows.min_p, number * 7919, number.int() + 3)
    found = sampling.sample_ahead(rows.logits, *columns, number.int(), last)
    assert found.clamp(min=-1).tolist() == wanted.tolist()


@pytest.mark.parametrize(("block", "part"), [(8192, 512), (64, 64)])
def test_sampling_of_allowed_tokens(block: int, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the first row's, none of the second's; the third has a NaN that is not allowed. 300 is not 32 n."""
    monkeypatch.setattr(sampling, "_THRESHOLD_BLOCK", block)
    monkeypatch.setattr(sampling, "_PART", part)
    rows, vocab = 8, 300
    logits, number = torch.randn(rows, vocab) * 3, torch.arange(rows)
    words = torch.randint(-(2**31), 2**31, (rows, 10)).int()
    words[0], words[1], words[2, 0] = -1, 0, -1 - 2**7
    logits[2, 7] = torch.nan
    temperature, min_p = torch.full((rows,), 0.8), torch.zeros(rows)
    temperature[3] = 0.0
    top_k, top_p = torch.tensor([0, 0, 0, 0, 5, 0, 40, 0]), torch.tensor([1, 1, 1, 1, 1, 0.5, 0.9, 0.95])
    columns = (temperature, top_k, top_p, min_p, number, number)
    wanted = kernels.sample(mask_logits(logits, words), *columns)
    last = torch.zeros(rows, dtype=torch.int32)
    found = sampling.sample_ahead(
        *(logits, temperature, top_k.int(), top_p, min_p, number, number.int(), number.int(), last, words)
    )
    assert found[1] == sampling.NONE_ALLOWED
    assert torch.equal(found.clamp(min=-1).long(), wanted)
