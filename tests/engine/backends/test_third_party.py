"""A backend of another distribution: found by its entry point, started by its name, served by a gateway."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.backends import BackendError, create, fake_tokenizer
from engine.config import EngineConfig
from engine.plan import LoadError
from protocol import bundle
from protocol.sampling import SamplingParams
from tests.engine.sequences import Driver, Sequence
from tests.processes import ROOT, Process, Server

EXAMPLE = Path(__file__).parent / "third_party" / "bigram_backend.py"


def install(site: Path, name: str, target: str) -> None:
    """What an installer writes of a distribution that has one backend."""
    metadata = site / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[sluicegate.backends]\n{name} = {target}\n")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of installed distributions: the example's."""
    folder = tmp_path / "site"
    install(folder, "bigram", "bigram_backend:BigramRunner")
    shutil.copy(EXAMPLE, folder)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer, of one token a byte."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in bundle.unpack(fake_tokenizer.packed(2048)).items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def start_bigram(site: Path, model: Path, short_dir: Path, tmp_path: Path) -> Iterator[Callable[[], Process]]:
    started: list[Process] = []

    def start() -> Process:
        flags = ["engine", str(model), "--backend=bigram", f"--listen=ipc://{short_dir}/e.sock", "--threads=1"]
        environ = {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
        started.append(Process(flags, tmp_path / f"bigram-{len(started)}.log", environ=environ))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.mark.slow
def test_it_serves_requests_and_they_outlive_it(
    start_bigram: Callable[[], Process], start_gateway: Callable[..., Server], short_dir: Path, model: Path
) -> None:
    first = start_bigram()
    gateway = start_gateway(f"ipc://{short_dir}/e.sock")
    gateway.wait_until_ready()
    greedy = {"prompt": "abcabcab", "temperature": 0, "max_tokens": 7, "logprobs": 2}
    status, body = gateway.post("/v1/completions", greedy)
    assert status == 200, body
    (choice,) = json.loads(body)["choices"]
    assert choice["text"] == "cabcabc"
    sampled = {"prompt": "abacad", "seed": 5, "n": 2, "max_tokens": 12, "temperature": 0.8, "logprobs": 1}
    _, before = gateway.post("/v1/completions", sampled)
    one, other = json.loads(before)["choices"]
    assert one["text"] != other["text"]
    first.kill()
    start_bigram()
    gateway.wait_until_ready()
    _, after = gateway.post("/v1/completions", sampled)
    assert json.loads(after)["choices"] == [one, other]


def test_a_backend_that_cannot_be_imported_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "broken", "no_such_module:Runner")
    install(tmp_path, "nameless", "engine.backends.fake:NoSuchRunner")
    install(tmp_path, "fake", "no_such_module:Runner")  # ours keep their names
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendError, match=r"--backend broken \(no_such_module:Runner\) cannot be imported: No module"):
        create(EngineConfig(backend="broken"))
    with pytest.raises(BackendError, match=r"--backend nameless .* has no attribute 'NoSuchRunner'"):
        create(EngineConfig(backend="nameless"))
    with pytest.raises(
        BackendError, match="one of auto, broken, fake, nameless, torch_runner, transformers; got 'none'"
    ):
        create(EngineConfig(backend="none"))
    assert type(create(EngineConfig(backend="fake"))).__name__ == "FakeRunner"


def test_a_model_it_cannot_serve_is_told(site: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site)
    (model / "tokenizer.json").unlink()
    with pytest.raises(LoadError, match=r"has no tokenizer\.json; name a folder with one as --model"):
        create(EngineConfig(backend="bigram", model=str(model))).load(lambda phase, done, total: None)


def test_its_answers_depend_on_nothing_beside_them(site: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(site)
    runner = create(EngineConfig(backend="bigram", model=str(model), max_num_seqs=8))
    info = runner.load(lambda phase, done, total: None)

    def sequences() -> list[Sequence]:
        sampling = SamplingParams(max_tokens=8, temperature=0.0), SamplingParams(max_tokens=9, logprobs=1)
        return [Sequence(list(b"abcabcab"[: 8 - n]), sampling[n % 2], seed=n, preempt_after=n) for n in range(6)]

    driver = Driver(runner, num_blocks=info.num_blocks, block_size=info.block_size, max_num_seqs=8)
    together = driver.run(sequences())
    assert bytes(together[0]) == b"cabcabca"
    assert driver.run(sequences(), chunk=3) == together
    assert [driver.run([sequence])[0] for sequence in sequences()] == together


def test_the_page_has_the_example() -> None:
    assert f"```python\n{EXAMPLE.read_text()}```\n" in (ROOT / "docs" / "backends.md").read_text()
