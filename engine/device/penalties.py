"""Which tokens a sequence has, and how often: what penalties are computed from.

Sparse on purpose. A row of logits has tens of thousands of columns and a sequence some hundreds of
different tokens, so only those are read and written.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

_GROWTH = 64


class TokenCounts:
    """The different ids of one sequence, and how often each was generated (0: in the prompt only)."""

    def __init__(self, prompt_ids: array[int], generated_ids: array[int]) -> None:
        prompt, generated = np.frombuffer(prompt_ids, np.uint32), np.frombuffer(generated_ids, np.uint32)
        ids, places = np.unique(np.concatenate((prompt, generated)), return_inverse=True)
        self._size = len(ids)
        self._ids = np.zeros(self._size + _GROWTH, np.int64)
        self._ids[: self._size] = ids
        self._generated = np.zeros(self._size + _GROWTH, np.float32)
        self._generated[: self._size] = np.bincount(places[len(prompt) :], minlength=self._size)
        self._places = {int(token_id): place for place, token_id in enumerate(ids)}

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self._ids[: self._size]

    @property
    def generated(self) -> npt.NDArray[np.float32]:
        """Counts, in the order of `ids`. Exact: float32 holds integers up to 2^24."""
        return self._generated[: self._size]

    def add(self, token_id: int) -> None:
        """Count a generated token."""
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = self._size
            if self._size == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._generated = np.concatenate((self._generated, np.zeros_like(self._generated)))
            self._ids[place] = token_id
            self._size += 1
        self._generated[place] += 1
