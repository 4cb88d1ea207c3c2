"""Sequences of ids that must never be completed (`SamplingParams.bad_words`)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class BadWords:
    """Those of one choice, and as many of its last generated ids as the longest of them needs."""

    def __init__(self, words: Sequence[tuple[int, ...]], generated_ids: array[int]) -> None:
        self._words = [(list(word[:-1]), word[-1]) for word in words]
        self._num_recent = max(map(len, words)) - 1
        self._recent = generated_ids.tolist()[-self._num_recent :] if self._num_recent else []

    def add(self, token_id: int) -> None:
        """A generated token. Prompt tokens do not count: a word that begins there is not seen."""
        if self._num_recent:
            self._recent = [*self._recent, token_id][-self._num_recent :]

    @property
    def barred(self) -> npt.NDArray[np.int64]:
        """Ids that would complete a word now."""
        recent = self._recent
        ids = {last for begin, last in self._words if not begin or recent[-len(begin) :] == begin}
        return np.fromiter(ids, np.int64, len(ids))
