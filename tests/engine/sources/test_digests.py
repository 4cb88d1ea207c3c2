"""Digests against hashlib over the whole content, and against git's and S3's own values."""

from __future__ import annotations

import hashlib
import random

import pytest

from engine.sources.digests import Digest, DigestKind, Hasher

CONTENT = random.Random(0).randbytes(10_000)


def hashed(digest: Digest | None, content: bytes, size: int) -> Hasher:
    hasher = Hasher(digest, len(content))
    for at in range(0, len(content), size):
        hasher.update(content[at : at + size])
    return hasher


def parts(size: int) -> str:
    digests = [hashlib.md5(CONTENT[at : at + size]).digest() for at in range(0, len(CONTENT), size)]
    return f"{hashlib.md5(b''.join(digests)).hexdigest()}-{len(digests)}"


@pytest.mark.parametrize("chunk", [1, 999, 1000, 4096, 20_000])
@pytest.mark.parametrize(
    "digest",
    [
        None,
        Digest(DigestKind.SHA256, hashlib.sha256(CONTENT).hexdigest()),
        Digest(DigestKind.GIT_BLOB, hashlib.sha1(b"blob 10000\0" + CONTENT).hexdigest()),
        Digest(DigestKind.MD5, hashlib.md5(CONTENT).hexdigest()),
        Digest(DigestKind.MD5_OF_PARTS, parts(1000), 1000),
        Digest(DigestKind.MD5_OF_PARTS, parts(3333), 3333),
    ],
)
def test_in_chunks_of_any_size(digest: Digest | None, chunk: int) -> None:
    hasher = hashed(digest, CONTENT, chunk)
    assert hasher.sha256 == hashlib.sha256(CONTENT).hexdigest()
    assert hasher.mismatch() == ""


def test_git_names_an_empty_file_so() -> None:
    assert Hasher(Digest(DigestKind.GIT_BLOB, "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"), 0).mismatch() == ""


def test_another_byte() -> None:
    expected = hashlib.md5(CONTENT).hexdigest()
    hasher = hashed(Digest(DigestKind.MD5, expected), CONTENT[:-1] + b"!", 100)
    assert hasher.mismatch() == f"its md5 is {hashlib.md5(CONTENT[:-1] + b'!').hexdigest()}, not {expected}"
