"""Models of a hub that speaks Hugging Face's protocol (HF_ENDPOINT, HF_TOKEN).

The library knows where the hub is and the token; requests are ours, so that they can be continued in the
middle of a file and every file is checked against the digest that the hub gives for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from urllib.parse import quote

import httpx
from huggingface_hub import constants, get_token

from engine.sources.digests import Digest, DigestKind
from engine.sources.reference import HubReference
from engine.sources.remote import Interrupted, Listing, RemoteFile, SourceError, Transfer, Unreachable
from protocol.version import VERSION

_CONNECT_S = 10.0
_SILENCE_S = 30.0

#: Statuses that may be others the next time.
_PASSING = frozenset((408, 425, 429, 500, 502, 503, 504))


class HubSource:
    """`engine.sources.remote.Source` for one model of a hub. `close` it."""

    def __init__(self, reference: HubReference) -> None:
        self._reference = reference
        self._endpoint = constants.ENDPOINT.rstrip("/")
        # Ranges count bytes of the file, so it must not be compressed on the way.
        headers = {"user-agent": f"sluicegate/{VERSION}", "accept-encoding": "identity"}
        if token := get_token():
            headers["authorization"] = f"Bearer {token}"
        # A redirect to another host goes without the token; httpx sees to that.
        self._client = httpx.Client(
            headers=headers, follow_redirects=True, timeout=httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
        )
        self._version = ""
        self._digests: dict[str, Digest] = {}

    def close(self) -> None:
        self._client.close()

    def listing(self) -> Listing:
        name, revision = self._reference.name, self._reference.revision
        try:
            response = self._client.get(
                f"{self._endpoint}/api/models/{name}/revision/{quote(revision, safe='')}", params={"blobs": "true"}
            )
        except httpx.HTTPError as error:
            raise Unreachable(
                f"{name}: the hub at {self._endpoint} does not answer ({_text(error)}). Check the network and "
                "HF_ENDPOINT, or name a folder that holds the model."
            ) from error
        if response.status_code in _PASSING:
            raise Unreachable(f"{name}: the hub at {self._endpoint} answered {response.status_code}; try again later.")
        self._check(response)
        try:
            return self._read(response.json())
        except (ValueError, KeyError, TypeError) as error:
            raise SourceError(
                f"{name}: {self._endpoint} does not answer as a hub does ({error!r}). Check HF_ENDPOINT."
            ) from error

    def digest(self, file: RemoteFile) -> Digest | None:
        return self._digests.get(file.name)

    @contextlib.contextmanager
    def open(self, file: RemoteFile, start: int) -> Iterator[Transfer]:
        url = f"{self._endpoint}/{self._reference.name}/resolve/{self._version}/{quote(file.name)}"
        headers = {"range": f"bytes={start}-"} if start else {}
        try:
            with self._client.stream("GET", url, headers=headers) as response:
                if response.status_code in _PASSING:
                    raise Interrupted(f"the hub answered {response.status_code}")
                self._check(response)
                yield Transfer(_start(response, start), _chunks(response))
        except httpx.HTTPError as error:
            raise Interrupted(_text(error)) from error

    def _read(self, model: dict[str, object]) -> Listing:
        self._version = _commit(model["sha"])
        files = {}
        siblings = model["siblings"]
        if not isinstance(siblings, list):
            raise TypeError("siblings is not a list")
        for sibling in siblings:
            name, lfs = str(sibling["rfilename"]), sibling.get("lfs")
            if "/" in name or name.startswith("."):
                continue
            size = int(lfs["size"] if lfs else sibling["size"])
            if lfs and lfs.get("sha256"):
                self._digests[name] = Digest(DigestKind.SHA256, str(lfs["sha256"]))
            elif sibling.get("blobId"):
                self._digests[name] = Digest(DigestKind.GIT_BLOB, str(sibling["blobId"]))
            files[name] = RemoteFile(name, size)
        return Listing(self._version, files)

    def _check(self, response: httpx.Response) -> None:
        """Raise SourceError for an answer that another try would not change."""
        status, code = response.status_code, response.headers.get("x-error-code", "")
        if status in (200, 206):
            return
        name, revision = self._reference.name, self._reference.revision
        if code == "GatedRepo":
            raise SourceError(f"{name} is gated: accept its terms at {self._endpoint}/{name}, and set HF_TOKEN.")
        if code == "RevisionNotFound":
            raise SourceError(
                f"{name} has no revision {revision!r} at {self._endpoint}. Choose another with --revision."
            )
        if status in (401, 403, 404):
            raise SourceError(
                f"{name} is no folder here, and the hub at {self._endpoint} does not give it ({status}): there is no "
                "such model, or it is private. Check the name, or set HF_TOKEN to a token that may read it."
            )
        raise SourceError(f"{name}: the hub at {self._endpoint} answered {status} {response.reason_phrase}.")


def _start(response: httpx.Response, asked: int) -> int:
    """Where in the file the content begins: not where asked, if the hub has no ranges."""
    if response.status_code == 200:
        return 0
    range_ = response.headers.get("content-range", "")
    if not range_.startswith(f"bytes {asked}-"):
        raise Interrupted(f"asked for bytes from {asked} on, got {range_!r}")
    return asked


def _chunks(response: httpx.Response) -> Iterator[bytes]:
    try:
        yield from response.iter_raw()
    except httpx.HTTPError as error:
        raise Interrupted(_text(error)) from error


def _commit(sha: object) -> str:
    """It becomes a folder's name."""
    text = str(sha)
    if not text.isalnum() or len(text) > 64:
        raise ValueError(f"{text!r} is not a commit")
    return text


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
