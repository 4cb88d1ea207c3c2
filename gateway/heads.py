"""HTTP connections with a bound on a request's head, which uvicorn's httptools protocol has not.

The middleware bounds bodies, but sees a request only when its head is whole: 32 MB of header lines
were taken in and kept.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway import errors
from gateway.errors import HeadTooLarge

#: Request line and headers. nginx takes 32 KiB; what comes in one read with the end of the head is not counted.
MAX_HEAD_BYTES = 64 * 1024


def _refusal() -> bytes:
    error = HeadTooLarge(
        f"The request's line and headers are larger than {MAX_HEAD_BYTES} bytes, the most that is read."
    )
    body = errors.body(error)
    lines = (
        b"HTTP/1.1 431 Request Header Fields Too Large",
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"connection: close",
        b"",
        body,
    )
    return b"\r\n".join(lines)


_REFUSAL = _refusal()


class BoundedHeadProtocol(HttpToolsProtocol):
    """uvicorn's protocol; a head over the bound is answered with 431 and the connection closed."""

    _in_head = True
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.write(_REFUSAL)
            self.transport.close()
            return
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()
