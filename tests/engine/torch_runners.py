"""A loaded TorchRunner for tests, with settings other than the defaults named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.backends.torch_runner import TorchRunner
from engine.plan import ModelInfo
from tests.engine.sequences import Driver


@dataclass(frozen=True)
class Settings:
    """The settings the backend reads; small where that makes tests fast."""

    model: str | None
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory_bytes: int | None = 32 * 2**20
    max_num_seqs: int = 24
    reproducible: bool = True
    threads: int | None = 1
    device: str = "cpu"
    load_format: str = "auto"
    gpu_memory_utilization: float = 0.92
    max_num_batched_tokens: int = 4096
    cache_dir: Path = Path("/nonexistent")


def no_progress(phase: str, done: int, total: int) -> None:
    del phase, done, total


def load(settings: Settings) -> tuple[TorchRunner, ModelInfo]:
    runner = TorchRunner(settings)
    return runner, runner.load(no_progress)


def driver(runner: TorchRunner, info: ModelInfo, *, max_num_seqs: int = 24, seed: int = 0) -> Driver:
    return Driver(runner, num_blocks=info.num_blocks, block_size=info.block_size, max_num_seqs=max_num_seqs, seed=seed)
