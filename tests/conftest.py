"""What tests of several packages share: private addresses, our programs as processes, the leak check."""

from __future__ import annotations

import fcntl
import gc
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from protocol.config import default_cache_dir
from tests.engine.family_models import make_family_models
from tests.engine.tiny_models import make_tiny_models
from tests.processes import Engine, Process, Server, free_port

#: Flags of an engine that needs no model.
FAKE = ("--backend=fake",)


def pytest_configure() -> None:
    """Shells start background jobs with SIGINT ignored, and programs inherit that; ours are to heed it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _modules_are_no_garbage() -> None:
    """What collecting the tests imported stays: each collection of garbage after it is spared their 0.2 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _leaks_are_found_where_they_are_made(_modules_are_no_garbage: None) -> Iterator[None]:
    """An unclosed socket or file warns when it is collected, and warnings are errors: collect here,
    so that the error belongs to the module that leaks."""
    yield
    gc.collect()


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A private folder whose path leaves room for a socket's name (107 bytes in all)."""
    folder = tempfile.mkdtemp(prefix="sg-")
    yield Path(folder)
    shutil.rmtree(folder)


@pytest.fixture
def ipc_address(short_dir: Path) -> str:
    return f"ipc://{short_dir}/engine.sock"


@pytest.fixture
def _running() -> Iterator[list[Process]]:
    """Processes of this test, ended in reverse order after it."""
    processes: list[Process] = []
    yield processes
    for process in reversed(processes):
        process.close()


@pytest.fixture
def start_engine(_running: list[Process], short_dir: Path, tmp_path: Path) -> Callable[..., Engine]:
    """`start_engine(*flags, address=...)` runs `sluicegate engine`; by default the fake backend over ipc."""
    numbers = itertools.count()

    def start(*flags: str, address: str | None = None) -> Engine:
        number = next(numbers)
        where = address or f"ipc://{short_dir}/{number}.sock"
        engine = Engine(where, flags or FAKE, tmp_path / f"engine-{number}.log")
        _running.append(engine)
        return engine

    return start


@pytest.fixture
def start_gateway(_running: list[Process], tmp_path: Path) -> Callable[..., Server]:
    """`start_gateway(address, *flags)` runs `sluicegate gateway` for the engines at the addresses given."""
    numbers = itertools.count()

    def start(*addresses: str, flags: tuple[str, ...] = (), port: int | None = None) -> Server:
        command = ["gateway", *(f"--engine={address}" for address in addresses), *flags]
        gateway = Server(command, port or free_port(), tmp_path / f"gateway-{next(numbers)}.log")
        _running.append(gateway)
        return gateway

    return start


@pytest.fixture
def start_serve(_running: list[Process], tmp_path: Path) -> Callable[..., Server]:
    """`start_serve(*flags)` runs `sluicegate serve`; by default with the fake backend."""
    numbers = itertools.count()

    def start(*flags: str, port: int | None = None, environ: Mapping[str, str] | None = None) -> Server:
        log = tmp_path / f"serve-{next(numbers)}.log"
        server = Server(["serve", *(flags or FAKE)], port or free_port(), log, environ=environ)
        _running.append(server)
        return server

    return start


def _real_model(name: str) -> Path | None:
    folder = Path(os.environ.get("SLUICEGATE_CACHE_DIR") or default_cache_dir()) / "models" / name
    return folder if (folder / "config.json").exists() else None


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the demo model. Absent, a test that needs it is skipped, under CI it fails."""
    folder = _real_model("SmolLM2-135M-Instruct")
    if folder is None:
        reason = "no demo model in the cache; `sluicegate serve` gets it"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


@pytest.fixture(scope="session")
def qwen_model() -> Path:
    """Folder of Qwen2.5-Coder-0.5B-Instruct, which nothing here fetches: absent, its tests are skipped."""
    folder = _real_model("Qwen2.5-Coder-0.5B-Instruct")
    if folder is None:
        pytest.skip("no models/Qwen2.5-Coder-0.5B-Instruct in the cache; put the model's folder there")
    return folder


def _made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` has filled: one for all workers of a run, where pytest-xdist has several."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / name
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = Path(tempfile.mkdtemp(dir=base))
            make(partial)
            partial.rename(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model folder for each of `tiny_models.VARIANTS`, `llama_sharded`, and golden.json."""
    return _made_once(tmp_path_factory, "tiny_models", make_tiny_models)


@pytest.fixture(scope="session")
def golden(tiny_models: Path) -> dict[str, dict[str, list[list[float]]]]:
    """What transformers computed: {variant: {"ids": …, "logprobs": …}}, by prompt number."""
    golden: dict[str, dict[str, list[list[float]]]] = json.loads((tiny_models / "golden.json").read_text())
    return golden


@pytest.fixture(scope="session")
def family_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model folder for each of `family_models.VARIANTS`, and golden.json."""
    return _made_once(tmp_path_factory, "family_models", make_family_models)


@pytest.fixture(scope="session")
def kernel_cache() -> Path:
    """The user's own cache: native kernels are built once for all sessions."""
    return default_cache_dir()
