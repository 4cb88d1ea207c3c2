"""Server-sent events: the bytes of a stream, cut anywhere, to the data of its events."""

DONE = b"[DONE]"  # OpenAI's last event: the one that is not JSON


class EventParser:
    """Incremental parser of `text/event-stream` (WHATWG HTML, section 9.2.6), keeping only the data field.

    Comments (keep-alives), other fields and all three line ends are understood; an event without data is skipped.
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of each event that `chunk` completes, in order."""
        text, held = self._rest + chunk, b""
        if b"\r" in text:
            if text.endswith(b"\r"):  # perhaps half of a \r\n
                text, held = text[:-1], b"\r"
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *blocks, rest = text.split(b"\n\n")
        self._rest = rest + held
        return [data for block in blocks if (data := _data_of(block)) is not None]

    def finish(self) -> list[bytes]:
        """The event that the end of the stream completes: some servers leave out the last blank line."""
        rest, self._rest = self._rest, b""
        if not rest.endswith((b"\n", b"\r")):  # a line cut in the middle is no event
            return []
        data = _data_of(rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))
        return [] if data is None else [data]


def _data_of(block: bytes) -> bytes | None:
    if block.startswith(b"data: ") and b"\n" not in block:  # nearly every event of a stream of tokens
        return block[6:]
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
