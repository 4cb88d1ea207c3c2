import asyncio

import pytest

from loadtest.transport import BadResponse, Body, ConnectionLost, HttpClient
from tests.loadtest.mock_server import Fault, MockServer, serving

BODY = b'{"max_tokens": 2}'


async def test_connection_is_used_again() -> None:
    async with serving(MockServer()) as server, HttpClient(server.url) as client:
        for _ in range(3):
            body = Body()
            await client.post("/v1/chat/completions", BODY, body)
            assert body.status == 200
            assert body.data.endswith(b"data: [DONE]\n\n")
        assert server.num_connections == 1


async def test_connection_is_not_used_again_without_keep_alive() -> None:
    async with serving(MockServer()) as server, HttpClient(server.url, keep_alive=False) as client:
        for _ in range(3):
            await client.get("/v1/models")
        assert server.num_connections == 3
        assert all(b"Connection: close\r\n" in head for head in server.headers)


async def test_end_of_the_connection_may_be_the_end_of_the_body() -> None:
    async with serving(MockServer(chunked=False)) as server, HttpClient(server.url) as client:
        for _ in range(2):
            body = Body()
            await client.post("/v1/chat/completions", BODY, body)
            assert body.data.endswith(b"data: [DONE]\n\n")
        assert server.num_connections == 2


async def test_lost_connection_says_when() -> None:
    faults = [Fault.CLOSE_AT_ONCE, Fault.CLOSE_MID_STREAM]
    async with serving(MockServer(fault=faults.__getitem__)) as server, HttpClient(server.url) as client:
        with pytest.raises(ConnectionLost, match="closed before the response"):
            await client.post("/v1/chat/completions", BODY, Body())
        with pytest.raises(ConnectionLost, match="closed in the middle of the response"):
            await client.post("/v1/chat/completions", BODY, Body())


async def test_answer_that_is_not_http() -> None:
    async with serving(MockServer(fault=lambda _: Fault.NOT_HTTP)) as server, HttpClient(server.url) as client:
        with pytest.raises(BadResponse, match=r"not HTTP/1\.1"):
            await client.post("/v1/chat/completions", BODY, Body())


async def test_cancelled_request_closes_its_connection() -> None:
    async with serving(MockServer(first_delay_s=30)) as server, HttpClient(server.url) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.post("/v1/chat/completions", BODY, Body())
        body = await client.get("/v1/models")
        assert body.status == 200
        assert server.num_connections == 2


async def test_connection_that_the_server_closed_meanwhile_is_not_used() -> None:
    async with serving(MockServer()) as server, HttpClient(server.url) as client:
        await client.get("/v1/models")
    async with HttpClient(server.url) as client:
        with pytest.raises(OSError, match="Connect call failed"):
            await client.get("/v1/models")


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_root_may_end_in_v1(suffix: str) -> None:
    async with serving(MockServer()) as server, HttpClient(server.url + suffix, api_key="k-1") as client:
        assert (await client.get("/v1/models")).status == 200
        assert server.headers[0].startswith(b"GET /v1/models HTTP/1.1\r\n")
        assert b"\r\nAuthorization: Bearer k-1\r\n" in server.headers[0]
        assert b"\r\nHost: 127.0.0.1:%d\r\n" % server.port in server.headers[0]


async def test_interim_response_is_passed_over() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listener, HttpClient(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}") as client:
        body = await client.get("/")
        assert (body.status, body.data) == (200, b"ok")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://user:pw@host"])
def test_url_is_checked(url: str) -> None:
    with pytest.raises(ValueError, match="give http://HOST:PORT or https://HOST, without user name or password"):
        HttpClient(url)


def test_api_key_cannot_carry_a_header() -> None:
    with pytest.raises(ValueError, match="api key: only printable ASCII"):
        HttpClient("http://host", api_key="k\r\nX: 1")
