"""Tokenizer bundles: one blob, named by its hash."""

from __future__ import annotations

import hashlib
import re

import pytest

from protocol import bundle


def test_equal_files_give_equal_bytes_whatever_their_order():
    one = bundle.pack({"tokenizer.json": "{}", "chat_template.jinja": "é"})
    two = bundle.pack({"chat_template.jinja": "é", "tokenizer.json": "{}"})
    assert one == two
    assert bundle.unpack(one) == {"tokenizer.json": "{}", "chat_template.jinja": "é"}
    assert bundle.sha256(one) == hashlib.sha256(one).hexdigest()


@pytest.mark.parametrize(
    ("blob", "words"),
    [
        (b"\xff", "not a tokenizer bundle"),
        (b"[]", "object of file name to text"),
        (b'{"../evil":"x"}', "'../evil' does not belong"),
        (b'{"tokenizer.json":1}', "tokenizer.json in a tokenizer bundle must be text"),
    ],
)
def test_what_is_no_bundle_is_refused(blob, words):
    with pytest.raises(bundle.BundleError, match=re.escape(words)):
        bundle.unpack(blob)


def test_a_bundle_has_a_largest_size(monkeypatch):
    monkeypatch.setattr(bundle, "MAX_BYTES", 10)
    with pytest.raises(bundle.BundleError, match="at most 10"):
        bundle.pack({"tokenizer.json": "x" * 20})
