"""A hub and an object store on loopback, and a proxy that cuts connections."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import random
import socket
import threading
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

TOKEN = "hf_of_a_test"
KEY = "minio"


class Server:
    """Serves `files` (name to content) until closed, zeros for those named in `lies`; `requests` are in order."""

    def __init__(self, handler: type[http.server.BaseHTTPRequestHandler], files: dict[str, bytes]) -> None:
        self.files = files
        self.lies: frozenset[str] = frozenset()
        #: A file of which half is sent, and then nothing; `stalled` is set when that is so.
        self.stalls_at = ""
        self.stalled, self.resumed = threading.Event(), threading.Event()
        self.requests: list[str] = []
        #: Where ranges began that were not from the beginning.
        self.starts: list[int] = []
        self.gone = False
        self._servers: list[tuple[http.server.ThreadingHTTPServer, threading.Thread]] = []
        self.port = self.listen(handler)

    def listen(self, handler: type[http.server.BaseHTTPRequestHandler]) -> int:
        """Serve at another port as well, which is returned."""
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.owner = self  # type: ignore[attr-defined]
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        self._servers.append((server, thread))
        return int(server.server_address[1])

    def sent(self, name: str) -> bytes:
        return bytes(len(self.files[name])) if name in self.lies else self.files[name]

    def fetched(self, name: str) -> int:
        """How many requests for a file's content there were."""
        return sum(line.startswith("GET") and unquote(line).endswith(f"/{name}") for line in self.requests)

    def close(self) -> None:
        self.resumed.set()
        for server, thread in self._servers:
            server.shutdown()
            server.server_close()
            thread.join()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def owner(self) -> Server:
        return self.server.owner  # type: ignore[attr-defined,no-any-return]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle_one_request()
            return
        self.close_connection = True

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.owner.stalls_at and unquote(self.path).endswith(f"/{self.owner.stalls_at}"):
            self.wfile.write(body[: len(body) // 2])
            self.owner.stalled.set()
            self.owner.resumed.wait()
            self.close_connection = True
            return
        self.wfile.write(body)

    def answer_range(self, content: bytes, **headers: str) -> None:
        """The part that the Range header asks for, else all."""
        asked = self.headers.get("Range")
        if asked is None:
            self.answer(200, content, **headers)
            return
        start = int(asked.removeprefix("bytes=").partition("-")[0])
        if start:
            self.owner.starts.append(start)
        where = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.answer(206, content[start:], Content_Range=where, **headers)


class HubHandler(Handler):
    owner: HubServer  # type: ignore[assignment]

    def do_GET(self) -> None:
        hub, parts = self.owner, urlsplit(self.path)
        hub.requests.append(f"GET {parts.path}")
        if hub.gone:
            self.answer(503)
        elif parts.path.startswith("/cdn/"):  # another origin's
            hub.cdn_tokens.append(self.headers.get("Authorization"))
            self.answer_range(hub.sent(parts.path.removeprefix("/cdn/")))
        elif hub.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, X_Error_Code="RepoNotFound")
        elif parts.path.startswith(f"/api/models/{hub.name}/revision/"):
            revision = unquote(parts.path.rpartition("/")[2])
            if revision in ("main", hub.version):
                self.answer(200, json.dumps(hub.model()).encode())
            else:
                self.answer(404, X_Error_Code="RevisionNotFound")
        elif parts.path.startswith(f"/{hub.name}/resolve/{hub.version}/"):
            self._resolve(parts.path.rpartition("/")[2])
        else:
            self.answer(404, X_Error_Code="RepoNotFound")

    def _resolve(self, name: str) -> None:
        if name in self.owner.large:
            self.answer(302, Location=f"http://127.0.0.1:{self.owner.cdn_port}/cdn/{name}")
        elif self.owner.ranges:
            self.answer_range(self.owner.files[name])
        else:
            self.answer(200, self.owner.files[name])


class HubServer(Server):
    """One model of one version. Files named in `large` lie at another address and have a sha256."""

    name = "acme/tiny"

    def __init__(self, files: dict[str, bytes], large: frozenset[str] = frozenset()) -> None:
        super().__init__(HubHandler, files)
        self.large = large
        self.private = False
        self.ranges = True
        self.cdn_port = self.listen(HubHandler)
        self.cdn_tokens: list[str | None] = []

    @property
    def version(self) -> str:
        return hashlib.sha1(b"".join(self.files.values())).hexdigest()

    def model(self) -> dict[str, object]:
        siblings = []
        for name, content in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            sibling: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": blob}
            if name in self.large:
                sibling["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
            siblings.append(sibling)
        return {"id": self.name, "sha": self.version, "siblings": siblings}


class S3Handler(Handler):
    owner: S3Server  # type: ignore[assignment]

    def do_GET(self) -> None:
        store, parts = self.owner, urlsplit(self.path)
        query = parse_qs(parts.query)
        store.requests.append(f"{self.command} {parts.path}")
        if store.gone:
            self._error(503, "SlowDown")
        elif f"Credential={KEY}/" not in self.headers.get("Authorization", ""):
            self._error(403, "AccessDenied")
        elif "list-type" in query:
            self._list(query["prefix"][0] if "prefix" in query else "", int(query.get("continuation-token", ["0"])[0]))
        else:
            self._object(unquote(parts.path).removeprefix(f"/{store.bucket}/"), "partNumber" in query)

    do_HEAD = do_GET

    def _list(self, prefix: str, start: int) -> None:
        """Three objects a page; what lies deeper is folded together, as the delimiter asks."""
        keys = sorted(key for key in self.owner.files if key.startswith(prefix) and "/" not in key[len(prefix) :])
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.owner.files[key])}</Size>"
            f"<ETag>{escape(self.owner.tag(key))}</ETag></Contents>"
            for key in keys[start : start + 3]
        )
        more = start + 3 < len(keys)
        token = f"<NextContinuationToken>{start + 3}</NextContinuationToken>" if more else ""
        text = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{items}</ListBucketResult>"
        self.answer(200, text.encode(), Content_Type="application/xml")

    def _object(self, key: str, first_part: bool) -> None:
        content = self.owner.files.get(key)
        if content is None:
            self._error(404, "NoSuchKey")
        elif self.headers.get("If-Match", self.owner.tag(key)) != self.owner.tag(key):
            self._error(412, "PreconditionFailed")
        elif first_part:
            size = self.owner.part_size if key in self.owner.in_parts else len(content)
            self.answer(206, content[:size], ETag=self.owner.tag(key))
        else:
            self.answer_range(self.owner.sent(key), ETag=self.owner.tag(key))

    def _error(self, status: int, code: str) -> None:
        self.answer(status, f"<Error><Code>{code}</Code><Message>told</Message></Error>".encode())


class S3Server(Server):
    """One bucket. Objects named in `in_parts` were uploaded in parts."""

    bucket = "models"
    part_size = 50_000

    def __init__(self, files: dict[str, bytes], in_parts: frozenset[str] = frozenset()) -> None:
        super().__init__(S3Handler, files)
        self.in_parts = in_parts

    def tag(self, key: str) -> str:
        content = self.files[key]
        if key not in self.in_parts:
            return f'"{hashlib.md5(content).hexdigest()}"'
        parts = [content[at : at + self.part_size] for at in range(0, len(content), self.part_size)]
        digests = b"".join(hashlib.md5(part).digest() for part in parts)
        return f'"{hashlib.md5(digests).hexdigest()}-{len(parts)}"'


class CuttingProxy:
    """Passes connections on to `target` and cuts each after a random number of answered bytes below `most`."""

    def __init__(self, target: int, most: int, seed: int) -> None:
        self.cuts = 0
        self._target, self._most, self._random = target, most, random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._sockets:
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += (client, server)
                budget = self._random.randrange(self._most)
                for call in ((client, server, None), (server, client, budget)):
                    thread = threading.Thread(target=self._pass_on, args=call)
                    self._threads.append(thread)
                    thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, budget: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(16384):
                if budget is not None and len(data) >= budget:
                    sink.sendall(data[:budget])
                    self.cuts += 1
                    break
                sink.sendall(data)
                budget = None if budget is None else budget - len(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
