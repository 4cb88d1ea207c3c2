"""Odd HTTP bodies: every field of a request with values of every type, and bodies that are none."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

from gateway.schemas import CHAT_KEYS, COMPLETION_KEYS, REFUSED, WITHOUT_EFFECT
from loadtest.sse import DONE, EventParser
from loadtest.transport import BadResponse, Body, ConnectionLost, HttpClient
from tests.fuzz.odd import odd_value

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

CONCURRENCY = 8
HEALTH_EVERY_S = 0.02

_OTHER_FIELDS = (*REFUSED, *WITHOUT_EFFECT, "unknown", "", "\ud83d", "__class__")
_FIELDS = {
    CHAT: tuple(key.name for key in CHAT_KEYS),
    COMPLETIONS: tuple(key.name for key in COMPLETION_KEYS),
}


def odd_bodies(seed: int) -> Iterator[tuple[str, bytes]]:
    """(path, body); endless, and the same for the same seed."""
    rng = random.Random(seed)
    while True:
        path = rng.choice((CHAT, COMPLETIONS))
        yield path, rng.choices(_MAKERS, _WEIGHTS)[0](path, rng)


def _valid(path: str, rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": 4, "stream": rng.random() < 0.5}
    if path == CHAT:
        return body | {"messages": [{"role": "user", "content": "hello"}]}
    return body | {"prompt": rng.choice(("hello", [104, 105], ["one", "two"], [[1], [2, 3]]))}


def _text(body: object) -> bytes:
    return json.dumps(body).encode("utf-8", "surrogatepass")


def _odd_fields(path: str, rng: random.Random) -> bytes:
    body = _valid(path, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        name = rng.choice(_FIELDS[path] if rng.random() < 0.8 else _OTHER_FIELDS)
        body[name] = odd_value(rng)
    return _text(body)


def _odd_messages(path: str, rng: random.Random) -> bytes:
    """Something odd somewhere in a history that has everything."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: list[Any] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    at: Any = messages
    while True:
        key = rng.choice(list(at) if isinstance(at, dict) else range(len(at)))
        if isinstance(at[key], dict | list) and at[key] and rng.random() < 0.8:
            at = at[key]
            continue
        at[key] = odd_value(rng)
        return _text(_valid(CHAT, rng) | {"messages": messages})


def _odd_bytes(path: str, rng: random.Random) -> bytes:
    text = _text(_valid(path, rng))
    match rng.randrange(7):
        case 0:
            return text[: rng.randrange(len(text))]
        case 1:
            return rng.randbytes(rng.randrange(300))
        case 2:
            return b"\xef\xbb\xbf" + text
        case 3:
            return text.decode().encode("utf-16")
        case 4:
            return text.replace(b"hello", rng.choice((b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\xbd", b"\x00")))
        case 5:
            return rng.choice((b"null", b"[]", b'"text"', b"1", b"NaN", b"{}", b"{}{}", b"", b" "))
        case _:
            return text.replace(b'"max_tokens"', b'"max_tokens": 3, "max_tokens"', 1)


def _deep(path: str, rng: random.Random) -> bytes:
    depth = rng.choice((100, 900, 1020, 1024, 2000, 100_000))
    value = rng.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth, b"[" * depth))
    names = rng.sample((*_FIELDS[path], *_OTHER_FIELDS[:-2]), rng.choice((1, 2, 50)))
    return _text(_valid(path, rng) | dict.fromkeys(names, "@")).replace(b'"@"', value)


def _big(path: str, rng: random.Random) -> bytes:
    """Up to and over the limit of a body, which is 2 MiB for a short context."""
    size = rng.choice((100_000, 1_900_000, 2_200_000))
    name = rng.choice(_FIELDS[path])
    value = rng.choice(
        (
            lambda: "x" * size,
            lambda: ["word"] * (size // 8),
            lambda: [1] * (size // 3),
            lambda: {f"k{number}": number for number in range(size // 16)},
            lambda: "\U0001f336" * (size // 12),
            lambda: "9" * size,
        )
    )()
    text = _text({**_valid(path, rng), name: value})
    return text.replace(b'"' + b"9" * size + b'"', b"9" * size)  # a number of a million digits


_MAKERS: tuple[Callable[[str, random.Random], bytes], ...] = (_odd_fields, _odd_messages, _odd_bytes, _deep, _big)
_WEIGHTS = (60, 15, 15, 7, 3)


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """`statuses` of the answers, 0 for a connection that was dropped; `faults` are the bodies that must not be."""

    statuses: dict[int, int]
    faults: list[str]
    slowest_health_s: float


async def fuzz(url: str, seed: int, count: int) -> Fuzzed:
    """Send `count` odd bodies to a gateway, some at a time, and ask for /health all the while."""
    bodies = itertools.islice(odd_bodies(seed), count)
    statuses: Counter[int] = Counter()
    faults: list[str] = []
    async with HttpClient(url) as client:

        async def worker() -> None:
            for path, body in bodies:
                answer = Body()
                try:
                    await client.post(path, body, answer)
                except (OSError, ConnectionLost, BadResponse) as error:
                    answer.status, answer.data = 0, repr(error).encode()
                statuses[answer.status] += 1
                if fault := _fault(answer):
                    faults.append(f"{path} {body[:200]!r}: {fault}")

        async with _watched(url) as slowest:
            await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
        return Fuzzed(dict(statuses), faults, *slowest)


def _fault(answer: Body) -> str:
    """What is wrong with an answer: an error must be OpenAI's object, all JSON without NaN and Infinity."""
    if answer.status == 0 or answer.status >= 500:
        return f"{answer.status} {answer.data[:200]!r}"
    try:
        if answer.data.startswith((b"data:", b":")):
            events = [orjson.loads(event) for event in EventParser().feed(answer.data) if event != DONE]
            return "".join(f"an error in the stream: {event}" for event in events if "error" in event)
        whole = orjson.loads(answer.data)
    except orjson.JSONDecodeError as error:
        return f"{error}: {answer.data[:200]!r}"
    if answer.status == 200:
        return ""
    message = whole["error"]["message"]
    return "" if 0 < len(message) <= 2000 else f"no useful message: {whole}"


#: A process of its own: this one makes bodies of megabytes, and would measure itself.
_WATCH = """
import http.client, sys, threading, time
host, port, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
connection, slowest = http.client.HTTPConnection(host, port, timeout=30), 0.0
while not ended.wait(pause):
    asked = time.perf_counter()
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 200
    slowest = max(slowest, time.perf_counter() - asked)
connection.close()
print(slowest)
"""


@asynccontextmanager
async def _watched(url: str) -> AsyncIterator[list[float]]:
    """The longest wait for /health while inside, in the list afterwards."""
    parts = urlsplit(url)
    command = (sys.executable, "-c", _WATCH, str(parts.hostname), str(parts.port), str(HEALTH_EVERY_S))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    slowest: list[float] = []
    try:
        yield slowest
    finally:
        output, _ = await process.communicate(b"")  # the end of its input ends it
        if process.returncode == 0:
            slowest.append(float(output))
