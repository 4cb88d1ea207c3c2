"""From a choice to a client's connection: what every token of a stream goes through.

Most events differ in their text alone. They are made of the bytes around it, which are the same for
all events of a choice, without a `Delta` for each; the rest is `Reply.events`.
"""

from __future__ import annotations

import orjson

from gateway.client import Writer
from gateway.measures import RequestMeasure
from gateway.replies import Reply
from gateway.stream import Choice
from protocol.tally import Stopwatch, Tally


class EventOutlet:
    """An outlet for `Generation.pour`: events of choices, measured and written."""

    __slots__ = ("_frames", "_measure", "_reply", "_taps", "_writer", "drain")

    def __init__(self, reply: Reply, measure: RequestMeasure, writer: Writer) -> None:
        self._reply = reply
        self._frames = reply.text_frames
        self._measure = measure
        self._writer = writer
        self._taps: list[EventTap | None] = [None] * len(self._frames)
        self.drain = writer.drain

    def put(self, choice: Choice) -> bool:
        """Write what is unread of a choice, unless the client reads too slowly."""
        if self._writer.write_paused:
            return False
        tap = None if choice.finished else self._tap(choice.index)
        if tap is None:
            delta = choice.take()
            self._measure.streamed(delta)
            if events := self._reply.events(delta):
                self._writer.write_body(events)
        else:
            if text := choice.take_text():
                tap.put(orjson.dumps(text))
            else:
                tap.tick()
            choice.open_tap(tap)
        return True

    def _tap(self, index: int) -> EventTap | None:
        """That of a choice, once it has begun; None where its events have more to tell than text."""
        tap = self._taps[index]
        if tap is None and (frame := self._frames[index]) is not None:
            measure = self._measure
            tap = self._taps[index] = EventTap(frame, measure.gaps, measure.stopwatches[index], self._writer)
        return tap


class EventTap:
    """Events of a choice with text alone. What a token needs is in one place: all of it is cold in the caches."""

    __slots__ = ("_after", "_before", "_gaps", "_stopwatch", "_writer")

    def __init__(self, frame: tuple[bytes, bytes], gaps: Tally, stopwatch: Stopwatch, writer: Writer) -> None:
        """`frame` is what stands before and after the text; `gaps` takes the times between tokens."""
        self._before, self._after = frame
        self._gaps = gaps
        self._stopwatch = stopwatch
        self._writer = writer

    def put(self, json: bytes) -> bool:
        """Write the event of a text, unless the client reads too slowly."""
        writer = self._writer
        if writer.write_paused:
            return False
        self._gaps.lap(self._stopwatch)
        writer.write_body(json, self._before, self._after)
        return True

    def tick(self) -> None:
        """Tokens without a text were delivered."""
        self._gaps.lap(self._stopwatch)
