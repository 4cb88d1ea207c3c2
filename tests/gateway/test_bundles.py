"""Tokenizer bundles on disk."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gateway.bundles import BundleCache
from tests.gateway.scripted_engine import BUNDLE, SERVING

NAME = SERVING.bundle


async def test_what_was_stored_is_loaded(tmp_path: Path) -> None:
    cache = BundleCache(tmp_path)
    assert await cache.load(NAME) is None
    assert await cache.store(NAME, BUNDLE)
    assert await BundleCache(tmp_path).load(NAME) == BUNDLE
    assert [path.name for path in (tmp_path / "tokenizers").iterdir()] == [NAME]


async def test_a_wrong_blob_is_not_kept(tmp_path: Path) -> None:
    cache = BundleCache(tmp_path)
    assert not await cache.store(NAME, BUNDLE + b" ")
    assert not (tmp_path / "tokenizers").exists()


async def test_a_damaged_file_is_ignored_and_replaced(tmp_path: Path) -> None:
    cache = BundleCache(tmp_path)
    await cache.store(NAME, BUNDLE)
    (tmp_path / "tokenizers" / NAME).write_bytes(BUNDLE[:-1])
    assert await cache.load(NAME) is None
    assert await cache.store(NAME, BUNDLE)
    assert await cache.load(NAME) == BUNDLE


async def test_a_disk_that_cannot_be_used_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tokenizers").write_text("in the way")
    cache = BundleCache(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert await cache.store(NAME, BUNDLE)
        assert await cache.load(NAME) is None
    assert caplog.messages == ["bundle_not_kept", "bundle_not_read"]
