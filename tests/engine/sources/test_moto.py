"""A model out of moto's S3 server, an implementation that is not ours, one object of it uploaded in parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from botocore.session import Session

from engine.sources import resolve
from tests.engine.sources.servers import CuttingProxy

moto_server = pytest.importorskip("moto.server", reason="moto is not installed")

FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": random.Random(2).randbytes(7 * 2**20)}
PART_BYTES = 5 * 2**20  # the least that S3 takes


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[int]:
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


def upload(port: int) -> None:
    client = Session().create_client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1")
    client.create_bucket(Bucket="models")
    for name in ("config.json", "tokenizer.json"):
        client.put_object(Bucket="models", Key=f"tiny/{name}", Body=FILES[name])
    at = {"Bucket": "models", "Key": "tiny/model.safetensors"}
    upload_id = client.create_multipart_upload(**at)["UploadId"]
    parts = []
    for number, start in enumerate(range(0, len(FILES["model.safetensors"]), PART_BYTES), 1):
        body = FILES["model.safetensors"][start : start + PART_BYTES]
        etag = client.upload_part(**at, UploadId=upload_id, PartNumber=number, Body=body)["ETag"]
        parts.append({"PartNumber": number, "ETag": etag})
    client.complete_multipart_upload(**at, UploadId=upload_id, MultipartUpload={"Parts": parts})
    client.close()


@pytest.mark.slow
def test_a_model_through_cuts(
    port: int, cutting: Callable[..., CuttingProxy], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    upload(port)
    proxy = cutting(port, most=3 * 2**20, seed=1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    folder = resolve("s3://models/tiny", cache_dir=tmp_path, revision=None, offline=False, progress=lambda *_: None)
    assert {name: (folder / name).read_bytes() == content for name, content in FILES.items()} == dict.fromkeys(
        FILES, True
    )
    assert proxy.cuts > 0
