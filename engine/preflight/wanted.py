"""What is asked of a model: the settings that a look at its files can judge."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.preflight.devices import Device


@dataclass(frozen=True, slots=True)
class Wanted:
    """Fields as the options of the same names."""

    device: Device
    backend: str
    dtype: str
    load_format: str
    max_model_len: int | None
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    tensor_parallel_size: int = 1
    quantization: str | None = None
    kv_cache_dtype: str = "auto"

    @classmethod
    def by(cls, config: EngineConfig, device: Device) -> Wanted:
        """What an engine with these settings would ask."""
        return cls(
            device=device,
            backend=config.backend,
            dtype=config.dtype,
            load_format=config.load_format,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            block_size=config.block_size,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            gpu_memory_utilization=config.gpu_memory_utilization,
            tensor_parallel_size=config.tensor_parallel_size,
            quantization=config.quantization,
            kv_cache_dtype=config.kv_cache_dtype,
        )
