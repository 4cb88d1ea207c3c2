"""Our own backend: loads a model folder and runs it with torch and the project's operators."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

import kernels
from engine.device.kv import default_kv_memory_bytes, plan_kv
from engine.device.runner import ModelRunner
from engine.loading.formats import Checkpoint, TensorEntry
from engine.loading.generation import eos_ids, generation_defaults, read_generation_config
from engine.loading.identity import model_digest, numerics_hash
from engine.loading.store import ModelError, ModelFolder
from engine.loading.tokenizers import tokenizer_bundle
from engine.loading.weights import STORED, WeightReader
from engine.models import family_of
from engine.models.decoder import Decoder
from engine.models.spec import ConfigFields, Family, ModelSpec
from engine.plan import ModelInfo, Progress, StepPlan, StepResult
from engine.quant import LinearMethod, method_of

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RunnerConfig(Protocol):
    """The settings this backend reads; None means that the backend chooses."""

    @property
    def model(self) -> str | None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def max_model_len(self) -> int | None: ...
    @property
    def block_size(self) -> int: ...
    @property
    def kv_cache_memory_bytes(self) -> int | None: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def cache_dir(self) -> Path: ...


@dataclass(frozen=True, slots=True)
class _Source:
    """A model folder, read and checked as far as that goes without reading weights."""

    folder: ModelFolder
    family: Family
    spec: ModelSpec
    method: LinearMethod
    checkpoint: Checkpoint
    tokenizer: bytes
    eos_ids: tuple[int, ...]
    generation_defaults: dict[str, object]

    @classmethod
    def read(cls, model: str | None) -> _Source:
        if model is None:
            raise ModelError("no model is named; give its folder as --model.")
        folder = ModelFolder(Path(model))
        config = folder.read_object("config.json")
        generation = read_generation_config(folder)
        family = family_of(config.get("architectures"))
        spec = family.spec(ConfigFields(config))
        return cls(
            folder=folder,
            family=family,
            spec=spec,
            method=method_of(config),
            checkpoint=Checkpoint(folder),
            tokenizer=tokenizer_bundle(folder),
            eos_ids=eos_ids(generation, config, spec.vocab_size),
            generation_defaults=generation_defaults(generation),
        )


class TorchRunner:
    """`engine.plan.Runner` for model folders of the registered families, on the CPU."""

    max_in_flight = 1

    def __init__(self, config: RunnerConfig) -> None:
        self._config = config
        self._runner: ModelRunner | None = None

    def load(self, progress: Progress) -> ModelInfo:
        """Read everything; raises ModelError for a model or setting that cannot be served, RuntimeError
        when this machine's arithmetic is not reproducible.
        """
        config = self._config
        progress("preparing kernels", 0, 0)
        _start_kernels(config)
        source = _Source.read(config.model)
        spec, checkpoint = source.spec, source.checkpoint
        stored = _DTYPES[_dtype_name(config.dtype, spec, checkpoint.entries)]
        # The CPU computes float16 in float32: only the weights stay as small as they are.
        active = torch.float32 if stored is torch.float16 else stored
        context_length = _context_length(config.max_model_len, spec)
        memory_bytes = config.kv_cache_memory_bytes
        if memory_bytes is None:
            memory_bytes = default_kv_memory_bytes(checkpoint.num_bytes)
        kv = plan_kv(
            spec, block_size=config.block_size, dtype=active, memory_bytes=memory_bytes, context_length=context_length
        )
        reader = WeightReader(checkpoint, stored, progress)
        model = Decoder(
            spec,
            source.family.names,
            reader=reader,
            method=source.method,
            dtype=active,
            num_positions=context_length,
        )
        reader.finish(_unused(spec, source.family))
        self._runner = ModelRunner(model, kv, max_num_seqs=config.max_num_seqs, context_length=context_length)
        digest = model_digest(source.folder, source.tokenizer, checkpoint)
        return ModelInfo(
            digest=digest,
            numerics=_numerics(digest, source.method, stored=stored, active=active, kv=kv.dtype),
            vocab_size=spec.vocab_size,
            context_length=context_length,
            block_size=kv.block_size,
            num_blocks=kv.num_blocks,
            eos_ids=source.eos_ids,
            generation_defaults=source.generation_defaults,
            bundle=source.tokenizer,
        )

    def launch(self, plan: StepPlan) -> None:
        self._loaded().launch(plan)

    def collect(self) -> StepResult:
        return self._loaded().collect()

    def close(self) -> None:
        """Let go of weights and pool."""
        self._runner = None

    def _loaded(self) -> ModelRunner:
        assert self._runner is not None, "load() comes first"
        return self._runner


def _start_kernels(config: RunnerConfig) -> None:
    """Raises RuntimeError when bits depend on the batch here."""
    implementation = kernels.start(cache_dir=config.cache_dir / "kernels")
    if implementation is kernels.Implementation.NATIVE:
        # The operators have threads of their own, and torch's would wait for each other by spinning:
        # loading SmolLM2 takes 0.7 s of processor time with one of them, 2.7 s with two.
        torch.set_num_threads(1)
    kernels.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    kernels.self_check()


def _dtype_name(asked: str, spec: ModelSpec, entries: Mapping[str, TensorEntry]) -> str:
    """`asked`, or for "auto" what the config says, or else what most of the weights are stored in."""
    if asked != "auto":
        return asked
    if spec.dtype is not None:
        return spec.dtype
    largest = max(entries.values(), key=lambda entry: entry.num_bytes)
    return str(STORED.get(largest.dtype, torch.float32)).removeprefix("torch.")


def _context_length(asked: int | None, spec: ModelSpec) -> int:
    if asked is None:
        return spec.max_positions
    if asked > spec.max_positions:
        raise ModelError(
            f"--max-model-len {asked} is more than the model's max_position_embeddings, {spec.max_positions}."
        )
    return asked


def _unused(spec: ModelSpec, family: Family) -> tuple[str, ...]:
    """Endings of tensors that may be left over: a tied head is sometimes stored all the same."""
    return (*family.ignored, f"{family.names.head}.weight") if spec.tied_head else family.ignored


def _numerics(digest: str, method: LinearMethod, *, stored: torch.dtype, active: torch.dtype, kv: torch.dtype) -> str:
    return numerics_hash(
        {
            "digest": digest,
            "dtype": str(active),
            "weights": f"{method.name} {stored}",
            "kernels": kernels.numerics_name(),
            "kv_dtype": str(kv),
            "tensor_parallel_size": 1,
            "device": f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            "torch": torch.__version__,
            "reproducible": True,
        }
    )
