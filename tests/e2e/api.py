"""A client of the HTTP API for tests: whole answers, and streams read event by event."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import orjson

from loadtest.compare import Answer, differences
from loadtest.sse import DONE, EventParser

Body = Mapping[str, Any]

TIMEOUT_S = 60.0

#: Plain HTTP needs no certificates, and to read the system's takes a client 30 to 100 ms.
_VERIFY = False


class Stream:
    """An open streamed answer. `raw` is what was read of it."""

    def __init__(self, response: httpx.Response) -> None:
        self.raw = b""
        self._chunks = response.iter_bytes()
        self._parser = EventParser()
        self._events: list[bytes] = []

    def read_events(self, count: int) -> None:
        """Read until `count` more events, comments not counted, are there."""
        seen = len(self._events)
        while len(self._events) < seen + count:
            self._read(next(self._chunks))

    def read_to_end(self) -> Answer:
        for chunk in self._chunks:
            self._read(chunk)
        return Answer.from_stream(self.raw)

    @property
    def done(self) -> bool:
        """Whether `[DONE]` was read."""
        return DONE in self._events

    def _read(self, chunk: bytes) -> None:
        self.raw += chunk
        self._events += self._parser.feed(chunk)


class Api:
    """The two main routes of a server at `url`."""

    def __init__(self, url: str) -> None:
        self._url = url

    def post(self, path: str, body: Body) -> httpx.Response:
        return httpx.post(f"{self._url}{path}", content=orjson.dumps(body), timeout=TIMEOUT_S, verify=_VERIFY)

    def answer(self, path: str, body: Body) -> Answer:
        """The unstreamed answer; fails unless the status is 200."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return Answer.from_body(orjson.loads(response.content))

    @contextmanager
    def stream(self, path: str, body: Body) -> Iterator[Stream]:
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with (
            httpx.Client(timeout=TIMEOUT_S, verify=_VERIFY) as client,
            client.stream("POST", f"{self._url}{path}", content=orjson.dumps(streamed)) as response,
        ):
            if response.status_code != 200:
                response.read()
            assert response.status_code == 200, response.text
            yield Stream(response)

    def answers(self, path: str, bodies: list[Body]) -> list[Answer]:
        """Unstreamed answers of requests that run together."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(lambda body: self.answer(path, body), bodies))

    def metric(self, name: str) -> float:
        """Sum of a metric's samples over its labels; 0 where it has none yet."""
        text = httpx.get(f"{self._url}/metrics", timeout=TIMEOUT_S, verify=_VERIFY).text
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith((f"sluicegate:{name} ", f"sluicegate:{name}{{"))
        )


def assert_identical(expected: Answer, actual: Answer) -> None:
    assert [str(difference) for difference in differences(expected, actual)] == []
