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


class EventOutlet:
    """An outlet for `Generation.pour`: events of choices, measured and written."""

    __slots__ = ("_delivered", "_frames", "_measure", "_reply", "_writer", "drain")

    def __init__(self, reply: Reply, measure: RequestMeasure, writer: Writer) -> None:
        self._reply = reply
        self._frames = reply.text_frames
        self._measure = measure
        self._delivered = measure.delivered
        self._writer = writer
        self.drain = writer.drain

    def put(self, choice: Choice) -> bool:
        """Write what is unread of a choice, unless the client reads too slowly."""
        writer = self._writer
        if writer.write_paused:
            return False
        frame = self._frames[choice.index]
        if frame is None or choice.finished:
            delta = choice.take()
            self._measure.streamed(delta)
            if events := self._reply.events(delta):
                writer.write(events)
        else:
            text = choice.take_text()
            self._delivered(choice.index)
            if text:
                before, after = frame
                writer.write(b"".join((before, orjson.dumps(text), after)))
        return True
