"""What fits: bytes of weights, steps and KV on each device, the longest context, the number of sequences."""

from __future__ import annotations

import math

from engine.config import BLOCK_UNIT, LARGEST_BLOCK
from engine.host_memory import default_kv_memory_bytes
from engine.models.layout import ModelLayout
from engine.models.spec import ModelSpec
from engine.preflight.devices import Device
from engine.preflight.report import MemoryPlan, Report
from engine.preflight.wanted import Wanted

_ABOUT = "memory"
_PARALLEL = "tensor parallel"

#: An engine's own limit: a start refuses what a plan only remarks. With one {} for the size.
ONE_DEVICE = "--tensor-parallel-size {}: an engine runs a model on one device so far."

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}

#: Values are padded to a multiple of this many dimensions in the pool (`kernels.kv_cache_shapes`).
_LANES = 16

#: What a GPU engine keeps for graphs' own memory, fragments and penalties (`engine.device.gpu_memory`).
_GPU_RESERVE = 2**30


def check_parallel(spec: ModelSpec, size: int, device: Device, report: Report) -> None:
    """Whether the model can be divided among `size` devices. Vocabularies are padded, so any will do."""
    if size == 1:
        return
    report.warn(_PARALLEL, f"{ONE_DEVICE.format(size)} What fits is planned for {size} all the same.")
    inner = [(inner_size, "columns of the MLP") for inner_size in sorted(spec.inner_sizes)]
    for count, what in ((spec.num_heads, "attention heads"), *inner):
        if count % size:
            report.problem(
                _PARALLEL,
                f"Total number of {what} ({count}) must be divisible by tensor parallel size ({size}).",
                f"Choose {_or(divisor for divisor in range(1, 17) if _divides(spec, divisor))}.",
            )
    if max(spec.num_kv_heads, size) % min(spec.num_kv_heads, size):
        report.problem(
            _PARALLEL,
            f"Total number of key-value heads ({spec.num_kv_heads}) must be divisible by tensor parallel size ({size}) "
            "or divide it.",
            f"Choose {_or(divisor for divisor in range(1, 17) if _divides(spec, divisor))}.",
        )
    if device.kind == "cuda" and device.capability is not None and size > device.count:
        report.problem(
            _PARALLEL,
            f"--tensor-parallel-size {size} needs as many GPUs; this machine has {device.count}.",
            f"Choose at most {device.count}.",
        )


def active_dtype(dtype: str, device: Device) -> str:
    """That of activations. The CPU computes float16 in float32: only the weights stay as small as they are."""
    return "float32" if device.kind == "cpu" and dtype == "float16" else dtype


def plan_memory(
    spec: ModelSpec, layout: ModelLayout, dtype: str, kv_dtype: str, wanted: Wanted, report: Report
) -> None:
    """Fill in `report.memory`, with a problem where not even one sequence fits. Weights are of `dtype`."""
    device, size, context = wanted.device, wanted.tensor_parallel_size, _context_length(spec, wanted, report)
    on_cpu = device.kind == "cpu"
    weights = _weight_bytes(layout, size) * ITEM_BYTES[dtype]
    work = _step_bytes(spec, wanted, ITEM_BYTES[active_dtype(dtype, wanted.device)], size) + (
        0 if on_cpu else _GPU_RESERVE
    )
    kv_heads = math.ceil(spec.num_kv_heads / size)
    padded = math.ceil(spec.head_dim / _LANES) * _LANES
    per_token = spec.num_layers * kv_heads * (spec.head_dim + padded) * ITEM_BYTES[kv_dtype]
    total, pool = _pool_bytes(wanted, weights, work, on_disk=_weight_bytes(layout, 1) * ITEM_BYTES[dtype])
    tokens = longest = sequences = None
    if pool is not None and _check_block_size(wanted.block_size, report):
        num_blocks = max(0, pool) // (per_token * wanted.block_size)
        tokens = num_blocks * wanted.block_size
        longest = min(tokens, spec.max_context_length)
        sequences = num_blocks // math.ceil(context / wanted.block_size)
        if sequences == 0:
            _report_too_small(context, longest, total, weights, work, wanted, report)
    report.memory = MemoryPlan(
        device=device.name,
        num_devices=size,
        total=total,
        weights=weights,
        work=work,
        pool=pool,
        kv_per_token=per_token,
        context_length=context,
        max_tokens=tokens,
        max_context_length=longest,
        max_sequences=sequences,
    )


def _context_length(spec: ModelSpec, wanted: Wanted, report: Report) -> int:
    asked = wanted.max_model_len
    if asked is not None and asked > spec.max_context_length:
        report.problem(
            "context",
            f"--max-model-len {asked} is more than the model's context, {spec.max_context_length}.",
            f"Set it to at most {spec.max_context_length}.",
        )
        return spec.max_context_length
    return asked or spec.context_length


def _check_block_size(size: int, report: Report) -> bool:
    if BLOCK_UNIT <= size <= LARGEST_BLOCK and size % BLOCK_UNIT == 0:
        return True
    report.problem(
        "block size",
        f"--block-size {size} is not a multiple of {BLOCK_UNIT} from {BLOCK_UNIT} to {LARGEST_BLOCK}.",
        f"Leave it out ({BLOCK_UNIT}); larger blocks make tables shorter and share less.",
    )
    return False


def _weight_bytes(layout: ModelLayout, size: int) -> int:
    """Numbers in all weights of one of `size` devices. Tables are divided by rows, vectors are on each."""
    count = 0
    for matrix in layout.matrices:
        count += math.ceil(matrix.rows * matrix.columns / size)
        if matrix.bias:
            count += math.ceil(matrix.rows / size) if matrix.by_rows else matrix.rows
    for shape in layout.plain.values():
        count += math.ceil(shape[0] / size) * shape[1] if len(shape) == 2 else shape[0]
    return count


def _step_bytes(spec: ModelSpec, wanted: Wanted, item: int, size: int) -> int:
    """The widest moment of a step: residual, normed and gated MLP of all its tokens, logits of its sequences."""
    tokens = wanted.max_num_batched_tokens
    wide = max(2 * max(spec.inner_sizes), (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim) // size
    # What the experts answer waits in float32 to be added up.
    answers = 4 * spec.hidden_size * max(0 if layer.experts is None else layer.experts.top_k for layer in spec.layers)
    logits = 4 * wanted.max_num_seqs * spec.vocab_size
    graphs = 0 if wanted.device.kind == "cpu" else 4 * logits
    return tokens * ((3 * spec.hidden_size + wide) * item + answers) + 2 * logits + graphs


def _pool_bytes(wanted: Wanted, weights: int, work: int, *, on_disk: int) -> tuple[int | None, int | None]:
    """Memory of a device, and what of it is for KV; None where it is not known."""
    if wanted.device.kind == "cpu":
        asked = wanted.kv_cache_memory_bytes
        return None, default_kv_memory_bytes(on_disk) if asked is None else asked
    total = wanted.device.memory
    if wanted.kv_cache_memory_bytes is not None:
        return total, wanted.kv_cache_memory_bytes
    return total, None if total is None else int(total * wanted.gpu_memory_utilization) - weights - work


def _report_too_small(
    context: int, longest: int, total: int | None, weights: int, work: int, wanted: Wanted, report: Report
) -> None:
    if total is not None and int(total * wanted.gpu_memory_utilization) <= weights + work:
        report.problem(
            _ABOUT,
            f"Weights take {gib(weights)} and a step {gib(work)} of each GPU's {gib(total)}, of which "
            f"--gpu-memory-utilization {wanted.gpu_memory_utilization} may be used: nothing is left for KV.",
            "Take more GPUs (--tensor-parallel-size), a quantized model, or lower --max-num-batched-tokens.",
        )
        return
    shorter = f", or set --max-model-len to at most {longest}" if longest else ""
    option = "--kv-cache-memory-bytes" if total is None else "--gpu-memory-utilization"
    report.problem(
        _ABOUT,
        f"One sequence of {context} tokens does not fit: there is memory for the KV of {longest}.",
        f"Raise {option}{shorter}.",
    )


def _divides(spec: ModelSpec, size: int) -> bool:
    kv = max(spec.num_kv_heads, size) % min(spec.num_kv_heads, size)
    return not any(count % size for count in (spec.num_heads, *spec.inner_sizes)) and kv == 0


def _or(numbers: object) -> str:
    words = [str(number) for number in numbers]  # type: ignore[attr-defined]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
