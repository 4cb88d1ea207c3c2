"""Which waiting requests are held back, because others are computing what they would compute again.

Siblings say that they share a prompt: they wait for the first of them, wherever it is. Of all others the
prefix cache knows which blocks are coming: none of them waits for a request that is not running, or for
longer than that takes to compute the blocks.
"""

from __future__ import annotations

from engine.prefix import PrefixCache
from engine.request import Request


class Sharing:
    """The leaders of sibling groups, and what is awaited of the prefix cache."""

    def __init__(self, prefix: PrefixCache, block_size: int) -> None:
        self._prefix = prefix
        self._block_size = block_size
        self._leaders: dict[tuple[int, int], Request] = {}

    def lead(self, request: Request) -> None:
        """The others of its group wait for its prompt."""
        self._leaders[_group(request)] = request

    def unlead(self, request: Request) -> None:
        """Its prompt is computed, or it has ended. Harmless for who leads nobody."""
        if self._leaders and self._leaders.get(group := _group(request)) is request:
            del self._leaders[group]

    def holds_back(self, request: Request) -> bool:
        leader = self._leaders.get(_group(request))
        return (leader is not None and leader is not request) or self._awaits_blocks(request)

    def cacheable(self, request: Request) -> list[bytes]:
        """Names of the blocks that a request can enter with, where they are cached.

        Its last known token is always computed, since its hidden state gives the next one; and so is all from
        the first wanted logprob on, which hangs on the hidden state before it, into blocks of its own.
        """
        request.extend_hashes(self._block_size)
        most = request.num_to_compute if request.is_scored else request.next_scored - 1
        return request.hashes[1 : 1 + most // self._block_size]

    def _awaits_blocks(self, request: Request) -> bool:
        """Whether at least half of what it has to compute is coming, from requests that go before it.

        With less in common it had better begin. The answer holds until the last of these blocks is there, or is
        not coming any more: hundreds may wait, and each is asked at every step.
        """
        if request.awaited is not None and self._prefix.is_coming(request.awaited):
            return True
        request.awaited = None
        if not self._prefix.num_coming:
            return False
        names = self.cacheable(request)
        num_hits = len(self._prefix.match(names))
        count = self._prefix.count_coming(names[num_hits:], request.order)
        if not count or 2 * count * self._block_size < request.num_to_compute - num_hits * self._block_size:
            return False
        request.awaited = names[num_hits + count - 1]
        return True


def _group(request: Request) -> tuple[int, int]:
    """Key of its sibling group; no leader has the key of those without a group."""
    group = request.submit.group
    return request.owner, -1 if group is None else group
