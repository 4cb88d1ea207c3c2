"""Stop strings: where a text ends, and how much of it may be shown meanwhile."""

from __future__ import annotations


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces.

    The match that is complete first in the text wins; of two that end at the same character, the
    longer. Only a suffix that is a proper prefix of some stop string is held back, so how the
    text was cut into pieces changes neither the match nor the joined text.
    """

    __slots__ = ("_held", "_include_stop", "_stops")

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        """`stops` are not empty strings. With `include_stop` the match stays in the text."""
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Add `text`. Returns what may be shown now, and the stop string that ended it all, if one did.

        While not `armed` (fewer than min_tokens tokens) a complete match does not count, but one
        that only begins here may be completed later. After a match nothing more may be pushed.
        """
        if not self._stops:
            return text, None
        buffer = self._held + text
        if armed and (match := self._first_match(buffer)) is not None:
            start, stop = match
            self._held = ""
            return buffer[: start + len(stop) if self._include_stop else start], stop
        cut = len(buffer) - self._held_back(buffer)
        self._held = buffer[cut:]
        return buffer[:cut], None

    def finish(self) -> str:
        """What is still held back: the text has ended without a match."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        found = []
        for stop in self._stops:
            # A match that ends in the held part was complete before, while not armed.
            start = buffer.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _held_back(self, buffer: str) -> int:
        """Length of the longest suffix of `buffer` that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            # A suffix can only begin where the stop string's first character stands.
            start = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1))
            while start >= 0 and len(buffer) - start > longest:
                if stop.startswith(buffer[start:]):
                    longest = len(buffer) - start
                start = buffer.find(stop[0], start + 1)
        return longest
