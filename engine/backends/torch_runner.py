"""Our own backend: loads a model folder and runs it with torch and the project's operators."""

from __future__ import annotations

import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

import kernels
from engine.device.gpu_memory import kv_memory_bytes, measure_worst_step
from engine.device.gpu_runner import MAX_IN_FLIGHT, GpuRunner, GpuSettings
from engine.device.kv import KVLayout, plan_kv
from engine.device.runner import ModelRunner
from engine.host_memory import default_kv_memory_bytes
from engine.loading.formats import Checkpoint
from engine.loading.generation import eos_ids, generation_defaults, read_generation_config
from engine.loading.identity import model_digest, numerics_hash
from engine.loading.kv_cache import FP8, kv_cache_dtype
from engine.loading.quantization import NAMES, Quantization, check_described, read_quantization
from engine.loading.store import ModelError, ModelFolder
from engine.loading.tokenizers import tokenizer_bundle
from engine.loading.weights import STORED, DummyWeights, WeightReader
from engine.models import family_of
from engine.models.config import ConfigFields
from engine.models.decoder import Decoder
from engine.models.spec import Family, ModelSpec
from engine.plan import ModelInfo, Progress, StepPlan, StepResult
from engine.preflight.devices import USE_HALF, lacks_bfloat16, lacks_fp8
from engine.quant import UNUSED, LinearMethod, method_of
from engine.quant.kv_cache import read_kv_scales

log = logging.getLogger("engine")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_DTYPES = {**_DTYPES, FP8: kernels.FP8}


class RunnerConfig(Protocol):
    """The settings this backend reads; None means that the backend chooses."""

    @property
    def model(self) -> str | None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def quantization(self) -> str | None: ...
    @property
    def kv_cache_dtype(self) -> str: ...
    @property
    def max_model_len(self) -> int | None: ...
    @property
    def block_size(self) -> int: ...
    @property
    def kv_cache_memory_bytes(self) -> int | None: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def reproducible(self) -> bool: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def device(self) -> str: ...
    @property
    def load_format(self) -> str: ...
    @property
    def gpu_memory_utilization(self) -> float: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def cache_dir(self) -> Path: ...


@dataclass(frozen=True, slots=True)
class _Source:
    """A model folder, read and checked as far as that goes without reading weights. `checkpoint` is None
    when these will be random.
    """

    folder: ModelFolder
    family: Family
    spec: ModelSpec
    quantization: Quantization | None
    method: LinearMethod
    checkpoint: Checkpoint | None
    tokenizer: bytes
    eos_ids: tuple[int, ...]
    generation_defaults: dict[str, object]

    @classmethod
    def read(cls, model: str | None, load_format: str, quantization: str | None) -> _Source:
        if model is None:
            raise ModelError("no model is named; give its folder as --model.")
        folder = ModelFolder(Path(model))
        quantized = read_quantization(folder, quantization)
        config = folder.read_object("config.json")
        generation = read_generation_config(folder)
        family = family_of(config.get("architectures"))
        spec = family.spec(ConfigFields(config))
        checkpoint = None if load_format == "dummy" else Checkpoint(folder, load_format)
        if checkpoint is not None:
            check_described(quantized, checkpoint.entries, folder)
            family = family.named_by(checkpoint.entries)
        return cls(
            folder=folder,
            family=family,
            spec=spec,
            quantization=quantized,
            method=method_of(quantized),
            checkpoint=checkpoint,
            tokenizer=tokenizer_bundle(folder),
            eos_ids=eos_ids(generation, config, spec.vocab_size),
            generation_defaults=generation_defaults(generation),
        )


class TorchRunner:
    """`engine.plan.Runner` for model folders of the registered families, on a CPU or a GPU."""

    max_in_flight = 1  # on a GPU `load` sets two

    def __init__(self, config: RunnerConfig) -> None:
        self._config = config
        self._runner: ModelRunner | GpuRunner | None = None

    def load(self, progress: Progress) -> ModelInfo:
        """Read everything; raises ModelError for a model or setting that cannot be served, RuntimeError
        when this machine's arithmetic is not reproducible.
        """
        config = self._config
        source = _Source.read(config.model, config.load_format, config.quantization)
        spec = source.spec
        stored = _DTYPES[_dtype_name(config.dtype, source)]
        progress("preparing kernels", 0, 0)
        device = _start(config, stored)
        # The CPU computes float16 in float32: only the weights stay as small as they are.
        active = torch.float32 if stored is torch.float16 and device.type == "cpu" else stored
        context_length = _context_length(config.max_model_len, spec)
        kv_dtype = kv_cache_dtype(
            config.kv_cache_dtype,
            source.quantization,
            active=_name(active),
            on_cpu=device.type == "cpu",
            lacks_fp8=None if device.type == "cpu" else lacks_fp8(*_describe(device)),
        )
        build = _Build(
            *(config, source, device),
            stored=stored,
            active=active,
            kv_dtype=_KV_DTYPES[kv_dtype],
            context_length=context_length,
        )
        runner, kv, prefill_tokens = build.on_cpu(progress) if device.type == "cpu" else build.on_gpu(progress)
        self._runner = runner
        if device.type != "cpu":
            self.max_in_flight = MAX_IN_FLIGHT
        digest = model_digest(source.folder, source.tokenizer, source.checkpoint)
        return ModelInfo(
            digest=digest,
            numerics=build.numerics(digest),
            vocab_size=spec.vocab_size,
            context_length=context_length,
            block_size=kv.block_size,
            num_blocks=kv.num_blocks,
            eos_ids=source.eos_ids,
            generation_defaults=source.generation_defaults,
            bundle=source.tokenizer,
            prefill_tokens=prefill_tokens,
        )

    def launch(self, plan: StepPlan) -> None:
        self._loaded().launch(plan)

    def collect(self) -> StepResult:
        return self._loaded().collect()

    def close(self) -> None:
        """Let go of weights and pool."""
        self._runner = None

    def _loaded(self) -> ModelRunner | GpuRunner:
        assert self._runner is not None, "load() comes first"
        return self._runner


@dataclass(frozen=True, slots=True)
class _Build:
    """Makes the runner of a model; what was decided before its weights are read."""

    config: RunnerConfig
    source: _Source
    device: torch.device
    stored: torch.dtype
    active: torch.dtype
    kv_dtype: torch.dtype
    context_length: int

    def on_cpu(self, progress: Progress) -> tuple[ModelRunner, KVLayout, None]:
        """The pool is planned first, so that one too small is known before weights are read."""
        memory_bytes = self.config.kv_cache_memory_bytes
        if memory_bytes is None:
            checkpoint = self.source.checkpoint
            memory_bytes = default_kv_memory_bytes(0 if checkpoint is None else checkpoint.num_bytes)
        kv = self._plan_kv(memory_bytes)
        model = self._model(progress)
        runner = ModelRunner(model, kv, max_num_seqs=self.config.max_num_seqs, context_length=self.context_length)
        return runner, kv, None  # whole steps are as short as a CPU's tokens allow

    def on_gpu(self, progress: Progress) -> tuple[GpuRunner, KVLayout, int]:
        """The pool gets what the weights and a step leave, which is measured; with `ModelInfo.prefill_tokens`."""
        config, spec = self.config, self.source.spec
        model = self._model(progress)
        progress("measuring a step", 0, 0)
        worst = measure_worst_step(
            model,
            spec,
            device=self.device,
            dtype=self.active,
            kv_dtype=self.kv_dtype,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=config.max_num_batched_tokens,
        )
        memory_bytes = config.kv_cache_memory_bytes
        if memory_bytes is None:
            memory_bytes = kv_memory_bytes(
                worst,
                spec,
                device=self.device,
                dtype=self.active,
                max_num_seqs=config.max_num_seqs,
                context_length=self.context_length,
                utilization=config.gpu_memory_utilization,
            )
        kv = self._plan_kv(memory_bytes)
        progress("capturing graphs", 0, 0)
        settings = GpuSettings(
            dtype=self.active,
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=config.max_num_batched_tokens,
            context_length=self.context_length,
            device=self.device,
        )
        return GpuRunner(model, spec, kv, settings), kv, worst.prefill_tokens

    def _plan_kv(self, memory_bytes: int) -> KVLayout:
        spec, names = self.source.spec, self.source.family.names
        scales: tuple[kernels.KVScales, ...] = ()
        if self.kv_dtype is kernels.FP8:
            layers = [names.layer.format(number) for number in range(spec.num_layers)]
            scales = read_kv_scales(self.source.checkpoint, layers, names.qkv)
        return plan_kv(
            spec,
            block_size=self.config.block_size,
            dtype=self.kv_dtype,
            memory_bytes=memory_bytes,
            context_length=self.context_length,
            scales=scales,
        )

    def _model(self, progress: Progress) -> Decoder:
        source = self.source
        _log_quantization(source, self.stored)
        reader: WeightReader | DummyWeights
        if source.checkpoint is None:
            reader = DummyWeights(self.stored, self.device)
        else:
            reader = WeightReader(source.checkpoint, self.stored, progress, self.device)
        model = Decoder(
            source.spec,
            source.family.names,
            reader=reader,
            method=source.method,
            dtype=self.active,
            num_positions=self.context_length,
        )
        if isinstance(reader, WeightReader):
            reader.finish(_unused(source))
        return model

    def numerics(self, digest: str) -> str:
        """The hash of all that decides bits, for a model of this digest."""
        source, device = self.source, self.device
        if device.type == "cpu":
            operators = kernels.numerics_name()
            name = f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        else:
            operators = kernels.gpu_numerics_name(device)
            name = f"cuda {torch.cuda.get_device_name(device)}"
        return numerics_hash(
            {
                "digest": digest,
                "dtype": str(self.active),
                "weights": f"{source.method.name} {self.stored}",
                "rope": max(layer.rope.regime(self.context_length) for layer in source.spec.layers),
                "kernels": operators,
                "kv_dtype": str(self.kv_dtype),
                "tensor_parallel_size": 1,
                "device": name,
                "torch": torch.__version__,
                "reproducible": self.config.reproducible or device.type == "cpu",
            }
        )


def _start(config: RunnerConfig, dtype: torch.dtype) -> torch.device:
    """The device in force, its operators ready. Raises RuntimeError when bits depend on the batch there."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: torch sees no GPU here. Use --device cpu, or install a torch built for CUDA.")
    if config.device == "cpu" or not torch.cuda.is_available():
        if not config.reproducible:
            log.info("--no-reproducible changes nothing on a CPU: reproducible operators are all there are.")
        _start_cpu(config)
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    if dtype is torch.bfloat16:
        lacking = lacks_bfloat16(*_describe(device))
        if lacking is not None:
            raise ModelError(f"{lacking} {USE_HALF}")
    kernels.start_gpu(device, dtype, config.cache_dir / "kernels", reproducible=config.reproducible)
    return device


def _describe(device: torch.device) -> tuple[str, tuple[int, int]]:
    return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)


def _start_cpu(config: RunnerConfig) -> None:
    implementation = kernels.start(cache_dir=config.cache_dir / "kernels")
    if implementation is kernels.Implementation.NATIVE:
        # The operators have threads of their own, and torch's would wait for each other by spinning:
        # loading SmolLM2 takes 0.7 s of processor time with one of them, 2.7 s with two.
        torch.set_num_threads(1)
    kernels.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    kernels.self_check()


def _dtype_name(asked: str, source: _Source) -> str:
    """`asked`, or for "auto" what the config says, or else what most of the weights are stored in."""
    if asked != "auto":
        return asked
    if source.spec.dtype is not None:
        return source.spec.dtype
    if source.checkpoint is None:
        return "bfloat16"
    largest = max(source.checkpoint.entries.values(), key=lambda entry: entry.num_bytes)
    return _name(STORED.get(largest.dtype, torch.float32))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _context_length(asked: int | None, spec: ModelSpec) -> int:
    if asked is None:
        return spec.context_length
    if asked > spec.max_context_length:
        raise ModelError(
            f"--max-model-len {asked} is more than the model's context, which config.json limits to "
            f"{spec.max_context_length}."
        )
    return asked


def _log_quantization(source: _Source, stored: torch.dtype) -> None:
    if source.quantization is not None and source.quantization.of_weights:
        name = NAMES[source.quantization.method]
        log.info("Loading %s model", name)
        log.info("Using %s kernel: %s to %s", name, source.method.name, _name(stored))


def _unused(source: _Source) -> tuple[str, ...]:
    """Endings of tensors that may be left over: a tied head is sometimes stored all the same."""
    spec, family = source.spec, source.family
    quantized = () if source.quantization is None else UNUSED
    head = (f"{family.names.head}.weight",) if spec.tied_head else ()
    return (*family.ignored, *quantized, *head)
