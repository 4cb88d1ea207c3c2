from __future__ import annotations

from array import array
from collections import Counter

import numpy as np

from engine.device.penalties import TokenCounts
from protocol.messages import U32


def test_counts_of_prompt_and_generated() -> None:
    counts = TokenCounts(array(U32, [5, 5, 9]), array(U32, [9, 2, 9]))
    assert counts.ids.tolist() == [2, 5, 9]
    assert counts.generated.tolist() == [1.0, 0.0, 2.0]


def test_add_grows_and_counts() -> None:
    random = np.random.default_rng(0)
    prompt, generated = random.integers(0, 900, 50).tolist(), random.integers(0, 900, 700).tolist()
    counts = TokenCounts(array(U32, prompt), array(U32))
    for token_id in generated:
        counts.add(token_id)
    found = dict(zip(counts.ids.tolist(), counts.generated.tolist(), strict=True))
    assert found == {token_id: Counter(generated)[token_id] for token_id in set(prompt) | set(generated)}


def test_empty() -> None:
    counts = TokenCounts(array(U32), array(U32))
    assert len(counts.ids) == 0
