"""Models from a hub and an object store into the cache: whole or not at all."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest

from engine.sources import resolve
from engine.sources.cache import MANIFEST, Manifest
from engine.sources.remote import SourceError
from tests.engine.sources.conftest import NEEDED, SHARDS
from tests.engine.sources.servers import CuttingProxy, HubServer, S3Server, Server

#: Pulls of the slow tier; the full measure is 50.
NUM_PULLS = int(os.environ.get("SLUICEGATE_TEST_PULLS", "10"))

S3_MODEL = "s3://models/team/tiny"
Cutting = Callable[..., CuttingProxy]


def get(model: str, tmp_path: Path, *, offline: bool = False, revision: str | None = None) -> Path:
    return resolve(model, cache_dir=tmp_path, revision=revision, offline=offline, progress=lambda *_: None)


def whole(folder: Path, files: dict[str, bytes]) -> None:
    """The files that are needed, no other, each as it should be."""
    assert {path.name for path in folder.iterdir()} == NEEDED | {MANIFEST}
    for name in NEEDED:
        assert (folder / name).read_bytes() == files[name], name


@pytest.mark.parametrize("model", [HubServer.name, S3_MODEL])
def test_only_what_is_needed_and_once(
    model: str, hub: HubServer, s3: S3Server, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    server: Server = s3 if model == S3_MODEL else hub
    seen: list[tuple[str, int, int]] = []
    folder = resolve(model, cache_dir=tmp_path, revision=None, offline=False, progress=lambda *now: seen.append(now))
    whole(folder, model_files)
    total = sum(len(model_files[name]) for name in NEEDED)
    assert seen[0] == (f"looking up {model}", 0, 0)
    assert seen[-1] == (f"fetching {model}", total, total)
    manifest = Manifest.read(folder)
    assert manifest is not None
    assert manifest.files[SHARDS[0]].sha256 == hashlib.sha256(model_files[SHARDS[0]]).hexdigest()
    assert manifest.num_bytes == total
    assert get(model, tmp_path) == folder
    assert get(model, tmp_path, offline=True) == folder
    assert [server.fetched(name) for name in NEEDED if model_files[name] and name not in SHARDS] == [1, 1, 1]


def test_a_folder_stays_what_it_is(tmp_path: Path) -> None:
    assert get(str(tmp_path), tmp_path) == tmp_path
    assert get("/no/such/folder", tmp_path) == Path("/no/such/folder")


def test_a_token_is_for_the_hub_alone(hub: HubServer, tmp_path: Path) -> None:
    hub.private = True
    get(hub.name, tmp_path)
    assert hub.cdn_tokens == [None] * len(SHARDS)


def test_a_new_version_comes_beside_the_old(hub: HubServer, model_files: dict[str, bytes], tmp_path: Path) -> None:
    old = get(hub.name, tmp_path)
    version = hub.version
    hub.files["config.json"] = b"{}"
    new = get(hub.name, tmp_path)
    whole(new, {**model_files, "config.json": b"{}"})
    assert get(hub.name, tmp_path, offline=True) == new
    hub.gone = True
    assert get(f"{hub.name}@{version}", tmp_path) == old  # a commit needs no question


def test_objects_that_change_are_another_version(s3: S3Server, tmp_path: Path) -> None:
    old = get(S3_MODEL, tmp_path)
    s3.files["team/tiny/config.json"] = b"{}"
    assert get(S3_MODEL, tmp_path) != old


@pytest.mark.parametrize("model", [HubServer.name, S3_MODEL])
def test_a_source_that_is_away(model: str, hub: HubServer, s3: S3Server, tmp_path: Path) -> None:
    """What it had last will do; without that the error says what to look at."""
    folder = get(model, tmp_path)
    hub.gone = s3.gone = True
    assert get(model, tmp_path) == folder
    shutil.rmtree(tmp_path / "models")
    with pytest.raises(SourceError, match=r"answered 503.*; try again later"):
        get(model, tmp_path)
    with pytest.raises(SourceError, match=r"--offline forbids to fetch it\. Run `sluicegate models pull "):
        get(model, tmp_path, offline=True)


@pytest.mark.parametrize(
    ("model", "revision", "text"),
    [
        ("acme/other", None, "acme/other is no folder here, and the hub at .* does not give it.*or set HF_TOKEN"),
        ("acme/tiny", "v9", "acme/tiny has no revision 'v9' at .* Choose another with --revision"),
        ("acme/tiny@v9", None, "acme/tiny has no revision 'v9'"),
        ("s3://models/nothing", None, "no objects directly below this prefix.* Check bucket and prefix"),
        ("s3://models/team/tiny2", None, "has no weights in a form that is known"),
    ],
)
def test_what_is_not_there(
    model: str, revision: str | None, text: str, hub: HubServer, s3: S3Server, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=text):
        get(model, tmp_path, revision=revision)


def test_keys_that_may_not(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    with pytest.raises(SourceError, match="answered 403 AccessDenied: the key may not list") as caught:
        get(S3_MODEL, tmp_path)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(SourceError, match="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        get(S3_MODEL, tmp_path)
    assert "secret" not in str(caught.value)


def test_a_missing_shard_is_told_before_anything_is_fetched(hub: HubServer, tmp_path: Path) -> None:
    del hub.files[SHARDS[1]]
    with pytest.raises(SourceError, match=f"lists 3 shards, of which 1 are not there: {SHARDS[1]}"):
        get(hub.name, tmp_path)
    assert hub.fetched(SHARDS[0]) == 0


@pytest.mark.parametrize("model", [HubServer.name, S3_MODEL])
def test_wrong_content_is_never_kept(model: str, hub: HubServer, s3: S3Server, tmp_path: Path) -> None:
    """The source's digest is of other content than it sends."""
    hub.lies, s3.lies = frozenset({SHARDS[1]}), frozenset({f"team/tiny/{SHARDS[1]}"})
    with pytest.raises(SourceError, match=rf"{model}: {SHARDS[1]} came 2 times with wrong content: its .* is"):
        get(model, tmp_path)
    assert not [path for path in tmp_path.rglob(SHARDS[1]) if path.is_file()]


def test_a_hub_without_ranges(
    hub: HubServer, cutting: Cutting, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.large, hub.ranges = frozenset(), False
    proxy = cutting(hub.port, most=200_000, seed=1)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{proxy.port}")
    whole(get(hub.name, tmp_path), model_files)
    assert proxy.cuts > 0


def pull_through_cuts(
    model: str,
    seed: int,
    servers: tuple[HubServer, S3Server],
    cutting: Cutting,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> int:
    """Connections are cut every 40 kB or so; either the model is whole or the error says that it may be continued."""
    hub, s3 = servers
    proxy = cutting(
        s3.port if model == S3_MODEL else hub.port, most=random.Random(seed).randrange(9_000, 80_000), seed=seed
    )
    hub.cdn_port = proxy.port
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    texts = []
    for _ in range(10):
        try:
            whole(get(model, tmp_path), {name: hub.files[name] for name in NEEDED})
            break
        except SourceError as error:
            texts.append(str(error))
        assert not [path for path in tmp_path.glob("models/*/*/*/*") if not path.name.startswith(".")]
    else:
        pytest.fail(f"ten pulls, none complete: {texts}")
    assert all("the next try goes on from there" in text or "try again" in text for text in texts), texts
    return proxy.cuts


CHILD = """
import sys
from pathlib import Path
from engine.sources import resolve
print(resolve(sys.argv[1], cache_dir=Path(sys.argv[2]), revision=None, offline=False, progress=lambda *_: None))
"""


def start(model: str, hub: HubServer, tmp_path: Path) -> subprocess.Popen[str]:
    """The same pull in a process of its own."""
    environ = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{hub.port}"}
    words = [sys.executable, "-c", CHILD, model, str(tmp_path)]
    root = Path(__file__).parents[3]
    return subprocess.Popen(words, cwd=root, env=environ, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("model", [HubServer.name, S3_MODEL])
def test_a_kill_costs_nothing_that_was_fetched(
    model: str, hub: HubServer, s3: S3Server, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    server: Server = s3 if model == S3_MODEL else hub
    server.stalls_at = SHARDS[0]
    with start(model, hub, tmp_path) as process:
        assert server.stalled.wait(30)
        part = wait_for_size(tmp_path, f"{SHARDS[0]}.part", 60_000)  # what is not written out yet is lost
        for shard in SHARDS[1:]:
            wait_until_noted(tmp_path, shard)
        process.send_signal(signal.SIGKILL)
    server.stalls_at, size = "", part.stat().st_size
    part.with_name(f"{MANIFEST}.1.new").write_text("{")  # a kill may come before it gets its name
    assert not any(path.name == MANIFEST for path in tmp_path.glob("models/*/*/*/[0-9a-f]*/*"))
    server.requests.clear()
    seen: list[int] = []
    folder = resolve(
        model, cache_dir=tmp_path, revision=None, offline=False, progress=lambda _, done, total: seen.append(done)
    )
    whole(folder, model_files)
    assert not part.exists()
    assert server.fetched(SHARDS[1]) == 0
    assert server.starts == [size]


def wait_for_size(folder: Path, name: str, size: int) -> Path:
    deadline = time.monotonic() + 20
    while True:
        for path in folder.rglob(name):
            if path.stat().st_size >= size:
                return path
        assert time.monotonic() < deadline, f"{name} does not come to {size} bytes"
        time.sleep(0.01)


def wait_until_noted(folder: Path, name: str) -> None:
    deadline = time.monotonic() + 20
    while not any(name in path.read_text() for path in folder.rglob(MANIFEST)):
        assert time.monotonic() < deadline, f"{name} does not get into the manifest"
        time.sleep(0.01)


def test_two_at_once_fetch_once(hub: HubServer, model_files: dict[str, bytes], tmp_path: Path) -> None:
    hub.stalls_at = SHARDS[0]
    waited = threading.Event()
    found: list[Path] = []

    def progress(phase: str, done: int, total: int) -> None:
        if phase.startswith("waiting for another process that fetches acme/tiny"):
            waited.set()

    def second() -> None:
        found.append(resolve(hub.name, cache_dir=tmp_path, revision=None, offline=False, progress=progress))

    with start(hub.name, hub, tmp_path) as process:
        assert hub.stalled.wait(30)
        thread = threading.Thread(target=second)
        thread.start()
        assert waited.wait(20)
        hub.stalls_at = ""
        hub.resumed.set()  # the first goes on where its connection ended
        thread.join(20)
        assert process.stdout is not None
        assert process.stdout.read() == f"{found[0]}\n"
    whole(found[0], model_files)
    assert hub.fetched(SHARDS[1]) == 2  # once, by way of a redirect


def test_a_disk_without_room(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(
        SourceError, match=r"acme/tiny: 37\d* bytes are to be fetched, and the disk of .* has 1000 free"
    ):
        get(hub.name, tmp_path)


def test_a_cache_that_takes_no_files(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "models").touch()
    with pytest.raises(SourceError, match=r"cannot be put into .*Not a directory.*--cache-dir"):
        get(hub.name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 2 + NUM_PULLS))
def test_many_pulls_through_cuts(
    seed: int, hub: HubServer, s3: S3Server, cutting: Cutting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pull_through_cuts((HubServer.name, S3_MODEL)[seed % 2], seed, (hub, s3), cutting, monkeypatch, tmp_path)


@pytest.mark.parametrize("model", [HubServer.name, S3_MODEL])
def test_connections_cut_at_random(
    model: str, hub: HubServer, s3: S3Server, cutting: Cutting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert pull_through_cuts(model, 1, (hub, s3), cutting, monkeypatch, tmp_path) > 3
