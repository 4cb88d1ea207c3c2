"""Models in an object store that speaks S3: MinIO, Amazon's and others.

Address, region and keys come from where botocore looks for them: AWS_ENDPOINT_URL, AWS_REGION,
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, profiles, a machine's role.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError
from botocore.parsers import ResponseParserError
from botocore.session import Session

from engine.sources.digests import Digest, DigestKind
from engine.sources.reference import S3Reference
from engine.sources.remote import Interrupted, Listing, RemoteFile, SourceError, Transfer, Unreachable

_CONNECT_S = 10
_SILENCE_S = 30
_READ_BYTES = 64 * 1024

#: An ETag under one of these is no digest of the content.
_HIDES_MD5 = ("aws:kms", "aws:kms:dsse")


class S3Source:
    """`engine.sources.remote.Source` for the objects directly below one prefix. `close` it."""

    def __init__(self, reference: S3Reference) -> None:
        self._reference = reference
        self._prefix = f"{reference.prefix}/" if reference.prefix else ""
        try:
            self._client = _client()
        except (BotoCoreError, ValueError) as error:
            raise SourceError(f"{reference}: {error} Check AWS_ENDPOINT_URL, AWS_REGION and AWS_PROFILE.") from error
        self._endpoint = str(self._client.meta.endpoint_url)

    def close(self) -> None:
        self._client.close()

    def listing(self) -> Listing:
        files: dict[str, RemoteFile] = {}
        pages = self._client.get_paginator("list_objects_v2")
        with self._explained():
            for page in pages.paginate(Bucket=self._reference.bucket, Prefix=self._prefix, Delimiter="/"):
                if "IsTruncated" not in page:  # an answer that was cut inside its headers passes for an empty one
                    raise Unreachable(f"{self._reference}: {self._endpoint} broke off its answer; try again later.")
                for item in page.get("Contents", ()):
                    name = item["Key"][len(self._prefix) :]
                    if name and not name.startswith("."):
                        files[name] = RemoteFile(name, int(item["Size"]), str(item["ETag"]))
        if not files:
            raise SourceError(
                f"{self._reference}: there are no objects directly below this prefix at {self._endpoint}. "
                "Check bucket and prefix."
            )
        content = "\n".join(f"{file.name}\0{file.size}\0{file.tag}" for _, file in sorted(files.items()))
        return Listing(hashlib.sha256(content.encode()).hexdigest()[:40], files)

    def digest(self, file: RemoteFile) -> Digest | None:
        """From the ETag. How large the parts of an object were is asked for its first part."""
        with self._explained(file):
            # Without If-Match, which some stores compare with the tag of the part.
            head = self._client.head_object(**self._object(file), PartNumber=1)
        md5, dash, count = file.tag.strip('"').partition("-")
        if head.get("ServerSideEncryption") in _HIDES_MD5 or "SSECustomerAlgorithm" in head or len(md5) != 32:
            return None
        if not dash:
            return Digest(DigestKind.MD5, md5)
        if "ContentLength" not in head:
            raise Unreachable(f"{self._reference}: {self._endpoint} broke off its answer; try again later.")
        part_size = int(head["ContentLength"])
        if part_size == 0 or -(-file.size // part_size) != int(count):
            return None  # the store does not know parts, or they were of different sizes
        return Digest(DigestKind.MD5_OF_PARTS, f"{md5}-{count}", part_size)

    @contextlib.contextmanager
    def open(self, file: RemoteFile, start: int) -> Iterator[Transfer]:
        try:
            with self._explained(file):
                response = self._client.get_object(**self._object(file), IfMatch=file.tag, Range=f"bytes={start}-")
        except Unreachable as error:
            raise Interrupted(str(error)) from error
        body = response["Body"]
        with contextlib.closing(body):
            yield Transfer(start, _chunks(body))

    def _object(self, file: RemoteFile) -> dict[str, str]:
        return {"Bucket": self._reference.bucket, "Key": self._prefix + file.name}

    @contextlib.contextmanager
    def _explained(self, file: RemoteFile | None = None) -> Iterator[None]:
        """Turn the library's errors into ours."""
        try:
            yield
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise SourceError(
                f"{self._reference}: {error}. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE."
            ) from error
        except ClientError as error:
            raise self._answer(error, file) from error
        except (BotoCoreError, ResponseParserError) as error:
            raise Unreachable(
                f"{self._reference}: {error}. Check AWS_ENDPOINT_URL and the network, or name a folder that holds "
                "the model."
            ) from error

    def _answer(self, error: ClientError, file: RemoteFile | None) -> SourceError:
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        told = error.response.get("Error", {})
        text = f"{self._endpoint} answered {status} {told.get('Code', '')}".rstrip()
        if status >= 500 or status == 429:
            return Unreachable(f"{self._reference}: {text}; try again later.")
        if status in (404, 412) and file is not None:
            return SourceError(f"{file.name} was replaced or removed while the model was fetched. Start again.")
        if status == 404:
            return SourceError(f"{self._reference}: {text}: no such bucket. Check its name and AWS_ENDPOINT_URL.")
        if status in (401, 403):
            return SourceError(
                f"{self._reference}: {text}: the key may not list and read there. Check AWS_ACCESS_KEY_ID, "
                "AWS_SECRET_ACCESS_KEY and the bucket's policy."
            )
        return SourceError(f"{self._reference}: {text}: {told.get('Message', '')}")


def _client() -> Any:
    config = Config(
        connect_timeout=_CONNECT_S,
        read_timeout=_SILENCE_S,
        retries={"total_max_attempts": 1},  # `transfer` and `pulling` try again
        s3={"addressing_style": "path"},  # a store of one's own seldom has a DNS name for each bucket
    )
    return Session().create_client("s3", config=config)


def _chunks(body: Any) -> Iterator[bytes]:
    try:
        while chunk := body.read(_READ_BYTES):
            yield chunk
    except (BotoCoreError, OSError) as error:
        raise Interrupted(str(error)) from error
