"""Stop strings: where a text ends, and how much of it may be shown meanwhile."""

from __future__ import annotations

from functools import lru_cache

#: Stop strings whose table is kept; a request has at most 16, and its choices share them. A table
#: of the longest, 1024 characters, takes 0.2 ms to make and 40 KB.
_KEPT_TABLES = 64


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces.

    The match that is complete first in the text wins; of two that end at the same character, the
    longer. Only a suffix that is a proper prefix of some stop string is held back, so how the
    text was cut into pieces changes neither the match nor the joined text.

    Knuth, Morris and Pratt's automaton for each stop string: a character costs the same whatever came
    before, where 16 strings made to match almost took 6 ms a token.
    """

    __slots__ = ("_held", "_include_stop", "_matched", "_stops")

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        """`stops` are not empty strings. With `include_stop` the match stays in the text."""
        self._stops = tuple((stop, _fallbacks(stop)) for stop in stops)
        self._matched = [0] * len(stops)  # characters of each that the text ends with
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Add `text`. Returns what may be shown now, and the stop string that ended it all, if one did.

        While not `armed` (fewer than min_tokens tokens) a complete match does not count, but one
        that only begins here may be completed later. After a match nothing more may be pushed.
        """
        if not self._stops:
            return text, None
        found = []
        for number, (stop, fallbacks) in enumerate(self._stops):
            end, self._matched[number] = _advance(stop, fallbacks, self._matched[number], text, armed)
            if end is not None:
                found.append((end, -len(stop), stop))
        buffer = self._held + text
        if found:
            end, _, stop = min(found)
            end += len(self._held)
            self._held = ""
            return buffer[: end if self._include_stop else end - len(stop)], stop
        cut = len(buffer) - max(self._matched)
        self._held = buffer[cut:]
        return buffer[:cut], None

    def finish(self) -> str:
        """What is still held back: the text has ended without a match."""
        held, self._held = self._held, ""
        return held


def _advance(stop: str, fallbacks: list[int], matched: int, text: str, armed: bool) -> tuple[int | None, int]:
    """(where in `text` the first match that counts ends, how much of `stop` the text ends with)."""
    start = 0 if matched else text.find(stop[0])
    if start < 0:
        return None, 0
    for at in range(start, len(text)):
        character = text[at]
        while matched >= 0 and stop[matched] != character:
            matched = fallbacks[matched]
        matched += 1
        if matched == len(stop):
            if armed:
                return at + 1, 0
            matched = fallbacks[matched]
    return None, matched


@lru_cache(_KEPT_TABLES)
def _fallbacks(stop: str) -> list[int]:
    """Where to go on when `k` characters of `stop` matched and the next does not; -1: behind that character.

    The last is for a whole match. Places that would fail at the same character again are left out.
    """
    fallbacks = [-1]
    candidate = 0
    for character in stop[1:]:
        fallbacks.append(fallbacks[candidate] if character == stop[candidate] else candidate)
        while candidate >= 0 and character != stop[candidate]:
            candidate = fallbacks[candidate]
        candidate += 1
    fallbacks.append(candidate)
    return fallbacks
