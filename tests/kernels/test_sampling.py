from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import kernels
from kernels.sampling import noise_words
from protocol.sampling import LARGEST_UNIFORM, gumbel, noise_word

DRAWS = 2000
GOLDEN = Path(__file__).parent.parent / "golden" / "noise.json"


def _sample(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    rows = logits.shape[0]
    return kernels.sample(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.arange(rows) if seeds is None else seeds,
        torch.zeros(rows, dtype=torch.int64) if positions is None else positions,
    )


def _many(row: torch.Tensor, **filters: float) -> torch.Tensor:
    """How often each id came out of DRAWS draws from one row of logits."""
    ids = _sample(row.repeat(DRAWS, 1), positions=torch.arange(DRAWS) * 7, **filters)  # type: ignore[arg-type]
    return torch.bincount(ids, minlength=row.shape[0])


# --- noise ---------------------------------------------------------------------------------------


def test_words_are_the_golden_ones() -> None:
    rows = json.loads(GOLDEN.read_text())["rows"]
    for row in rows:
        words = noise_words(
            torch.tensor([row["choice_seed"]]), torch.tensor([row["position"]]), vocab_size=row["token"] + 1
        )
        assert int(words[0, row["token"]]) == row["word"]


def test_noise_is_that_of_the_protocol(implementation: object) -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]
    positions = [0, 1, 17, 8191, 2**31 - 1, 5]
    noise = kernels.gumbel_noise(torch.tensor(seeds), torch.tensor(positions), 999)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        exact = torch.tensor([gumbel(noise_word(seed, position, t)) for t in range(999)], dtype=torch.float64)
        torch.testing.assert_close(noise[row].double(), exact, rtol=4 * 2**-23, atol=1e-6)


def test_noise_of_the_extreme_words(implementation: object) -> None:
    # Over two million draws some u is within 2^-20 of 1 and some within 2^-20 of 0.
    noise = kernels.gumbel_noise(torch.arange(64), torch.arange(64), 2**15).flatten()
    words = noise_words(torch.arange(64), torch.arange(64), 2**15).flatten()
    exact = -(-((words >> 8).double() * 2**-24 + 2**-25).clamp(max=LARGEST_UNIFORM).log()).log()
    torch.testing.assert_close(noise.double(), exact, rtol=4 * 2**-23, atol=1e-6)
    assert float(noise.max()) > 13
    assert float(noise.min()) < -2.6


def test_noise_depends_on_seed_position_and_id_alone(implementation: object) -> None:
    seeds, positions = torch.arange(10) * 999, torch.arange(10) + 3
    whole = kernels.gumbel_noise(seeds, positions, 1000)
    kernels.set_num_threads(2)
    assert torch.equal(kernels.gumbel_noise(seeds[4:5], positions[4:5], 77), whole[4:5, :77])
    assert torch.equal(kernels.gumbel_noise(seeds[3:], positions[3:], 1000), whole[3:])


# --- choosing ------------------------------------------------------------------------------------


def test_greedy_takes_the_largest_and_of_equals_the_lowest_id(implementation: object) -> None:
    logits = torch.randn(5, 1003)
    logits[0, [17, 900]] = 50.0
    logits[1, [1002, 3, 500]] = 50.0
    logits[2, 1002] = 50.0
    assert _sample(logits, temperature=0.0).tolist()[:3] == [17, 3, 1002]
    assert torch.equal(_sample(logits, temperature=9e-6), logits.argmax(dim=1))


def test_is_the_largest_of_logits_over_temperature_plus_noise(implementation: object) -> None:
    rows, vocab = 40, 3001
    for spread in (0.0, 1.0, 5.0, 30.0):
        logits = torch.randn(rows, vocab) * spread
        seeds, positions = torch.randint(-(2**62), 2**62, (rows,)), torch.arange(rows)
        noise = kernels.gumbel_noise(seeds, positions, vocab)
        expected = (logits / 0.7 + noise).argmax(dim=1)
        assert torch.equal(_sample(logits, temperature=0.7, seeds=seeds, positions=positions), expected)


def test_chooses_by_probability(implementation: object) -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    counts = _many(probabilities.log())
    chi_square = ((counts - DRAWS * probabilities) ** 2 / (DRAWS * probabilities)).sum()
    assert float(chi_square) < 18.5  # 4 degrees of freedom: 0.1 %


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 1}, [0]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": -1}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.69}, [0, 1]),
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"top_p": 1e-6}, [0]),
        ({"min_p": 0.3}, [0, 1, 2]),
        ({"min_p": 0.24}, [0, 1, 2, 3]),
        ({"min_p": 1.0}, [0]),
        # Of the two that top_k leaves, the first has 0.4 / 0.7 = 0.57.
        ({"top_k": 2, "top_p": 0.56}, [0]),
        ({"top_k": 2, "top_p": 0.58}, [0, 1]),
        ({"top_k": 4, "top_p": 0.94, "min_p": 0.3}, [0, 1, 2]),
        ({"temperature": 0.5, "top_p": 0.58}, [0, 1]),  # 0.16 / 0.285 = 0.56
        ({"temperature": 0.5, "top_p": 0.55}, [0]),
    ],
    ids=str,
)
def test_filters(implementation: object, filters: dict[str, float], kept: list[int]) -> None:
    counts = _many(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log(), **filters)
    assert counts.nonzero().flatten().tolist() == kept


def test_of_equals_at_the_border_the_lowest_ids_stay(implementation: object) -> None:
    row = torch.zeros(700)
    row[[5, 300, 650]] = 1.0
    assert _many(row, top_k=2).nonzero().flatten().tolist() == [5, 300]
    assert _many(row, top_k=5).nonzero().flatten().tolist() == [0, 1, 5, 300, 650]
    flat = torch.zeros(8)
    assert _many(flat, top_p=0.49).nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_a_filtered_row_is_the_unfiltered_one_over_what_is_kept(implementation: object) -> None:
    logits, seeds = torch.randn(60, 2000) * 4, torch.arange(60)
    noise = kernels.gumbel_noise(seeds, torch.zeros_like(seeds), 2000)
    ordered = logits.sort(dim=1, descending=True).values
    for top_k in (1, 3, 50, 1999):
        masked = logits.masked_fill(logits < ordered[:, top_k - 1 : top_k], -torch.inf)
        assert torch.equal(_sample(logits, top_k=top_k), (masked + noise).argmax(dim=1))


def test_masked_tokens_are_never_chosen(implementation: object) -> None:
    row = torch.full((300,), -torch.inf)
    row[[7, 123, 299]] = torch.tensor([-3.0, -2.0, -2.5])
    cases: list[dict[str, float]] = [
        {},
        {"top_k": 10},
        {"top_p": 0.999},
        {"min_p": 0.01},
        {"top_k": 100, "top_p": 0.9999},
    ]
    for filters in cases:
        assert _many(row, **filters).nonzero().flatten().tolist() == [7, 123, 299]


def test_a_broken_row_gets_minus_one_and_spoils_no_other(implementation: object) -> None:
    logits = torch.randn(5, 100)
    expected = _sample(logits)
    logits[1, 50], logits[2, 99], logits[3] = torch.nan, torch.inf, -torch.inf
    for temperature in (1.0, 0.0):
        ids = _sample(logits, temperature=temperature)
        assert ids[1:4].tolist() == [-1, -1, -1]
    assert _sample(logits)[[0, 4]].tolist() == expected[[0, 4]].tolist()


@pytest.mark.parametrize("filters", [{}, {"top_k": 40, "top_p": 0.9}, {"top_p": 0.95}, {"min_p": 0.02}], ids=str)
def test_a_row_gets_the_same_id_in_any_batch(implementation: object, filters: dict[str, float]) -> None:
    logits, seeds, positions = torch.randn(257, 501) * 3, torch.arange(257) * 31, torch.arange(257) + 9
    whole = _sample(logits, seeds=seeds, positions=positions, **filters)  # type: ignore[arg-type]
    for threads in (1, 2):
        kernels.set_num_threads(threads)
        for rows in (*range(1, 41), 64, 100, 257):
            part = _sample(logits[-rows:], seeds=seeds[-rows:], positions=positions[-rows:], **filters)  # type: ignore[arg-type]
            assert torch.equal(part, whole[-rows:])


# --- logprobs ------------------------------------------------------------------------------------


def test_logprobs_are_the_log_softmax(implementation: object) -> None:
    logits = torch.randn(9, 5003) * 5
    ids = torch.randint(5003, (9,))
    exact = logits.double().log_softmax(dim=1)
    found = kernels.logprobs(logits, ids, 6)
    torch.testing.assert_close(found.own.double(), exact.gather(1, ids.unsqueeze(1)).squeeze(1), rtol=1e-6, atol=2e-6)
    values, order = exact.sort(dim=1, descending=True, stable=True)
    assert torch.equal(found.top_ids, order[:, :6])
    torch.testing.assert_close(found.top.double(), values[:, :6], rtol=1e-6, atol=2e-6)
    assert torch.equal(found.rank, (order == ids.unsqueeze(1)).int().argmax(dim=1) + 1)


def test_ranks_and_alternatives_put_the_lowest_of_equal_ids_first(implementation: object) -> None:
    logits = torch.zeros(2, 40)
    logits[:, [9, 30]] = 2.0
    found = kernels.logprobs(logits, torch.tensor([30, 3]), 5)
    assert found.top_ids.tolist() == [[9, 30, 0, 1, 2]] * 2
    assert found.rank.tolist() == [2, 6]


def test_a_row_has_the_same_logprobs_in_any_batch(implementation: object) -> None:
    logits, ids = torch.randn(64, 3001), torch.arange(64)
    whole = kernels.logprobs(logits, ids, 20)
    for threads in (1, 2):
        kernels.set_num_threads(threads)
        for rows in (1, 2, 3, 5, 8, 33):
            part = kernels.logprobs(logits[-rows:], ids[-rows:], 20)
            assert torch.equal(part.own, whole.own[-rows:])
            assert torch.equal(part.top, whole.top[-rows:])
            assert torch.equal(part.top_ids, whole.top_ids[-rows:])
            assert torch.equal(part.rank, whole.rank[-rows:])


def test_no_alternatives(implementation: object) -> None:
    found = kernels.logprobs(torch.randn(3, 50), torch.tensor([1, 2, 3]), 0)
    assert found.top.shape == found.top_ids.shape == (3, 0)
    assert found.own.shape == (3,)


def test_refuses_ids_and_counts_out_of_range(implementation: object) -> None:
    with pytest.raises(ValueError, match="k must be between 0 and the vocabulary size 50, got 51"):
        kernels.logprobs(torch.randn(1, 50), torch.tensor([1]), 51)
    with pytest.raises(IndexError, match=r"ids must be in 0..49, got 50..50"):
        kernels.logprobs(torch.randn(1, 50), torch.tensor([50]), 1)
