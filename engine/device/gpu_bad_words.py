"""`bad_words` on a GPU: the last generated ids are known there first, so that words are compared there."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.sampling import MAX_BAD_WORD_IDS

#: Equal to every id, and to none.
_ANY, _NONE = -1, -2


@dataclass(frozen=True, slots=True, eq=False)
class _Words:
    """A slot's: `begins` int32 [num_words, MAX_BAD_WORD_IDS - 1], filled up in front, `lasts` int64 [num_words]."""

    begins: Tensor
    lasts: Tensor


class GpuBadWords:
    """The words of each slot, and its last generated ids."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._words: list[_Words | None] = [None] * max_num_seqs
        self._recent = torch.full((max_num_seqs, MAX_BAD_WORD_IDS - 1), _NONE, dtype=torch.int32, device=device)

    def enter(self, slot: int, words: tuple[tuple[int, ...], ...], generated_ids: array[int]) -> None:
        """Take over a slot for a request."""
        width = self._recent.shape[1]
        begins = [[_ANY] * (width + 1 - len(word)) + list(word[:-1]) for word in words]
        self._words[slot] = _Words(
            self._sent(torch.tensor(begins, dtype=torch.int32)), self._sent(torch.tensor([word[-1] for word in words]))
        )
        known = generated_ids[-width:].tolist()
        self._recent[slot].copy_(self._sent(torch.tensor([_NONE] * (width - len(known)) + known, dtype=torch.int32)))

    def bar(self, logits: Tensor, slot: int) -> None:
        """Set the logits [vocab_size] of what would complete a word to -inf, in place."""
        words = self._words[slot]
        assert words is not None
        complete = ((words.begins == self._recent[slot]) | (words.begins == _ANY)).all(dim=1)
        # The least of several words with one last id: an index put would take any of them.
        bounds = torch.where(complete, -torch.inf, torch.inf)
        logits.scatter_reduce_(0, words.lasts, bounds, "amin")

    def add(self, slot: int, token_id: Tensor) -> None:
        """A generated token, int32 []."""
        recent = self._recent[slot]
        recent.copy_(torch.cat((recent[1:], token_id.view(1))))

    def _sent(self, values: Tensor) -> Tensor:
        if not self._recent.is_cuda:
            return values
        return values.pin_memory().to(self._recent.device, non_blocking=True)
