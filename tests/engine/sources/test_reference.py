"""What an operator may name as a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.sources.reference import HubReference, S3Reference, parse_reference
from engine.sources.remote import SourceError


@pytest.mark.parametrize(
    ("model", "revision", "expected"),
    [
        ("Qwen/Qwen2.5-0.5B", None, HubReference("Qwen/Qwen2.5-0.5B", "main")),
        ("acme/tiny@v1", None, HubReference("acme/tiny", "v1")),
        ("acme/tiny", "refs/pr/3", HubReference("acme/tiny", "refs/pr/3")),
        ("acme/tiny@v1", "v1", HubReference("acme/tiny", "v1")),
        ("s3://models/team/tiny/", None, S3Reference("models", "team/tiny")),
        ("s3://models", None, S3Reference("models", "")),
        ("/models/tiny", None, Path("/models/tiny")),
        ("./acme/tiny", None, Path("./acme/tiny")),
        ("tiny", None, Path("tiny")),
        ("../acme/tiny", None, Path("../acme/tiny")),
        ("a/b/c", None, Path("a/b/c")),
    ],
)
def test_names(model: str, revision: str | None, expected: object) -> None:
    assert parse_reference(model, revision) == expected


def test_a_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme/tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_reference("acme/tiny") == Path("acme/tiny")
    with pytest.raises(SourceError, match="--revision v1: acme/tiny is a folder"):
        parse_reference("acme/tiny", "v1")


@pytest.mark.parametrize(
    ("model", "revision", "text"),
    [
        ("acme/tiny@v1", "v2", "acme/tiny@v1 and --revision v2 name two revisions"),
        ("acme/tiny@../x", None, r"the revision '\.\./x' of acme/tiny is not a branch"),
        ("acme/tiny@", None, "the revision '' of acme/tiny"),
        ("s3://Models/x", None, "'Models' is not a bucket's name. Write s3://BUCKET/PREFIX"),
        ("s3://models/a/../b", None, "none of its parts '.' or '..'"),
        ("s3://models/" + "a" * 300, None, "at most 255 characters"),
        ("s3://models/a", "v1", "has no revisions"),
    ],
)
def test_refused(model: str, revision: str | None, text: str) -> None:
    with pytest.raises(SourceError, match=text):
        parse_reference(model, revision)


def test_folders_of_prefixes_do_not_lie_inside_each_other() -> None:
    folders = [S3Reference("models", prefix).folder for prefix in ("", "a", "a/b")]
    assert folders == [Path("s3/models/%"), Path("s3/models/a"), Path("s3/models/a%2Fb")]
    assert HubReference("acme/tiny", "v1").folder == Path("hub/acme/tiny")
    assert str(HubReference("acme/tiny", "v1")) == "acme/tiny@v1"
    assert str(S3Reference("models", "a/b")) == "s3://models/a/b"
