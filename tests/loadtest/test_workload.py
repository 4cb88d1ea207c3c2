from dataclasses import replace
from itertools import islice, pairwise

import pytest

from loadtest.workload import WORKLOADS, arrivals, prompts


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_same_seed_same_prompts(name: str) -> None:
    workload = WORKLOADS[name]
    first, again, other = (list(islice(prompts(workload, seed), 20)) for seed in (3, 3, 4))
    assert first == again
    assert not {prompt.text for prompt in first} & {prompt.text for prompt in other}


def test_sizes_spread_evenly_around_their_means() -> None:
    drawn = list(islice(prompts(WORKLOADS["chat"], 1), 2000))
    sizes = [len(prompt.text.split()) for prompt in drawn]
    assert (min(sizes), max(sizes)) == (64, 192)
    assert sum(sizes) / len(sizes) == pytest.approx(128, rel=0.02)
    outputs = [prompt.output_tokens for prompt in drawn]
    assert (min(outputs), max(outputs)) == (64, 192)


def test_without_spread_sizes_are_exact() -> None:
    workload = replace(WORKLOADS["long"], spread=0.0)
    assert {(len(p.text.split()), p.output_tokens) for p in islice(prompts(workload, 1), 9)} == {(1500, 64)}


def test_prefixes_are_shared_in_turn() -> None:
    drawn = list(islice(prompts(replace(WORKLOADS["shared-prefix"], num_prefixes=2), 1), 4))
    assert [prompt.prefix_index for prompt in drawn] == [0, 1, 0, 1]
    assert drawn[0].prefix == drawn[2].prefix != drawn[1].prefix
    assert len(drawn[0].prefix.split()) == 1000
    assert len({prompt.text for prompt in drawn}) == 4


def test_arrivals_are_poisson_at_the_rate() -> None:
    times = list(islice(arrivals(5.0, 1, 1), 4001))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert times[0] == 0.0
    assert mean == pytest.approx(0.2, rel=0.05)
    assert variance == pytest.approx(0.2**2, rel=0.1)  # of an exponential distribution: the mean squared
    assert times == list(islice(arrivals(5.0, 1, 1), 4001))


def test_bursts_keep_the_mean_rate() -> None:
    times = list(islice(arrivals(5.0, 16, 1), 16 * 500))
    assert all(len(set(times[start : start + 16])) == 1 for start in range(0, len(times), 16))
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.1)
