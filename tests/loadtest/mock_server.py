"""An OpenAI-compatible server on plain asyncio streams, whose timing, wire format and faults a test chooses."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import orjson

MODEL = "mock-model"


class Fault(Enum):
    NONE = auto()
    TOO_MANY_REQUESTS = auto()
    CLOSE_AT_ONCE = auto()
    CLOSE_MID_STREAM = auto()
    ERROR_EVENT = auto()
    BAD_JSON = auto()
    BAD_SHAPE = auto()
    NOT_HTTP = auto()
    END_WITHOUT_FINISH = auto()
    NO_TEXT = auto()
    HANG = auto()


@dataclass(slots=True)
class MockServer:
    """One answer is `max_tokens` tokens, one event each, after `first_delay_s` and then `gap_s` apart."""

    first_delay_s: float = 0.0
    gap_s: float = 0.0
    tokens_per_event: int = 1
    sends_usage: bool = True
    chunked: bool = True  # else the end of the connection is the end of the answer
    line_end: bytes = b"\n"
    refused_fields: tuple[str, ...] = ()
    fault: Callable[[int], Fault] = lambda number: Fault.NONE  # number: of the completion request, from 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[bytes] = field(default_factory=list)
    text_sent_at: list[float] = field(default_factory=list)  # perf_counter of each event with text
    num_connections: int = 0
    num_running: int = 0
    most_running: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client left
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """True if the connection stays open."""
        head = await reader.readuntil(b"\r\n\r\n")
        self.headers.append(head)
        path = head.split(b" ")[1].decode()
        if head.startswith(b"GET"):
            models = {"data": [{"id": MODEL}]} if path == "/v1/models" else {"version": "1.2.3"}
            _write_whole(writer, 200, models)
            return True
        length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        body = orjson.loads(await reader.readexactly(int(length.split(b":")[1])))
        fault = self.fault(len(self.bodies))
        self.bodies.append(body)
        for name in self.refused_fields:
            if name in body:
                _write_whole(writer, 400, {"error": {"message": f"unknown field {name}"}})
                return True
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            return await self._answer(writer, body, fault, chat=path.endswith("chat/completions"))
        finally:
            self.num_running -= 1

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, Any], fault: Fault, *, chat: bool) -> bool:
        if fault is Fault.TOO_MANY_REQUESTS:
            _write_whole(writer, 429, {"error": {"message": "no credit"}})
            return True
        if fault is Fault.CLOSE_AT_ONCE:
            return False
        if fault is Fault.NOT_HTTP:
            writer.write(b"+OK ready\r\n")
            return False
        framing = b"Transfer-Encoding: chunked\r\n" if self.chunked else b"Connection: close\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + framing + b"\r\n")
        async for data in self._events(body, fault, chat=chat):
            event = data.replace(b"\n", self.line_end)
            writer.write(b"%x\r\n%b\r\n" % (len(event), event) if self.chunked else event)
            await writer.drain()
        if fault in (Fault.CLOSE_MID_STREAM, Fault.ERROR_EVENT):
            writer.transport.abort()
            return False
        if self.chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return self.chunked

    async def _events(self, body: dict[str, Any], fault: Fault, *, chat: bool) -> AsyncIterator[bytes]:
        def event(text: str, finish: str | None = None) -> bytes:
            piece = {"delta": {"content": text} if text else {"role": "assistant"}} if chat else {"text": text}
            return _data({"choices": [{"index": 0, **piece, "finish_reason": finish}]})

        if chat:
            yield event("")
        await asyncio.sleep(self.first_delay_s)
        yield b": keep-alive\n\n"
        num_tokens = body["max_tokens"]
        for token in range(0, num_tokens, self.tokens_per_event):
            if token > 0:
                await asyncio.sleep(self.gap_s)
            if token >= num_tokens // 2 and fault is not Fault.NONE:
                break
            self.text_sent_at.append(time.perf_counter())
            yield event(" word" * min(self.tokens_per_event, num_tokens - token))
        if fault is Fault.HANG:
            await asyncio.sleep(60)
        if fault is Fault.ERROR_EVENT:
            yield _data({"error": {"message": "engine lost", "code": 503}})
        if fault is Fault.BAD_JSON:
            yield b"data: {oops}\n\n"
        if fault is Fault.BAD_SHAPE:
            yield _data({"choices": [7]})
        if fault in (Fault.CLOSE_MID_STREAM, Fault.ERROR_EVENT, Fault.END_WITHOUT_FINISH):
            return
        yield event("", "length")
        if self.sends_usage and body.get("stream_options"):
            details = {"cached_tokens": 16}
            usage = {"prompt_tokens": 40, "completion_tokens": num_tokens, "prompt_tokens_details": details}
            yield _data({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


@contextlib.asynccontextmanager
async def serving(server: MockServer) -> AsyncIterator[MockServer]:
    """Serves on a free port; at the end every connection is closed."""
    tasks: set[asyncio.Task[None]] = set()

    def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(server.on_connection(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listener = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await listener.wait_closed()


def _data(value: object) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _write_whole(writer: asyncio.StreamWriter, status: int, value: object) -> None:
    body = orjson.dumps(value)
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)
