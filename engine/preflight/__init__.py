"""A look at a model before it is loaded: every problem at once, in a second or two, without torch.

    report = check(Path("/models/llama"), wanted)

One file a question: `files` (all there and whole?), `tensors` (as config.json says?),
`quantization` (which layout?), `tokenizer`, `memory` (what fits?). `report` is the answer,
`table` shows it, `command` is `sluicegate check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from engine.loading.formats import TensorEntry
from engine.loading.generation import eos_ids, generation_defaults, read_generation_config
from engine.loading.kv_cache import kv_cache_dtype
from engine.loading.quantization import read_quantization
from engine.loading.store import ModelError, ModelFolder
from engine.models import FAMILIES, family_of
from engine.models.config import ConfigFields
from engine.models.layout import layout_of
from engine.models.spec import Family, ModelSpec
from engine.preflight.devices import USE_HALF, lacks_bfloat16, lacks_fp8
from engine.preflight.files import check_files
from engine.preflight.memory import active_dtype, check_parallel, plan_memory
from engine.preflight.quantization import check_quantization
from engine.preflight.report import Report
from engine.preflight.tensors import check_tensors
from engine.preflight.tokenizer import check_tokenizer
from engine.preflight.wanted import Wanted

#: safetensors' name of a type to ours, for configs that do not say.
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def check(path: Path, wanted: Wanted, *, name: str | None = None) -> Report:
    """Everything that can be told of the model in a folder without reading its weights. Raises nothing.

    `name` is what the operator calls it, else the path.
    """
    report = Report(name or str(path))
    try:
        folder = ModelFolder(path)
        config = folder.read_object("config.json")
    except ModelError as error:
        report.problem("files", str(error))
        return report
    family = _family(config, wanted, report)
    spec = _spec(config, family, report)
    entries = None if wanted.load_format == "dummy" else check_files(folder, wanted.load_format, report)
    stored = check_quantization(folder, entries or (), wanted.quantization, report)
    if family is not None and spec is not None:
        family = family.named_by(entries or ())
        layout = layout_of(spec, family.names)
        if entries:
            check_tensors(entries, layout, stored, family, spec, report)
        check_parallel(spec, wanted.tensor_parallel_size, wanted.device, report)
        dtype = _dtype(spec, wanted, entries or {}, report)
        plan_memory(spec, layout, dtype, _kv_dtype(folder, dtype, wanted, report), wanted, report)
    check_tokenizer(folder, None if spec is None else spec.vocab_size, report)
    _check_generation(folder, config, spec, report)
    return report


def _family(config: Mapping[str, object], wanted: Wanted, report: Report) -> Family | None:
    """The family, None where another backend takes the model or none does."""
    names = config.get("architectures")
    known = any(name in FAMILIES for name in names) if isinstance(names, list) else False
    if wanted.backend == "transformers" or (not known and wanted.backend == "auto"):
        report.warn(
            "architecture",
            f"{names!r} runs in the transformers backend, slow and right; shapes and memory are not judged.",
        )
        return None
    try:
        return family_of(names)
    except ModelError as error:
        report.problem("architecture", str(error), "Try --backend transformers.")
        return None


def _spec(config: Mapping[str, object], family: Family | None, report: Report) -> ModelSpec | None:
    if family is None:
        return None
    try:
        spec = family.spec(ConfigFields(config))
    except ModelError as error:
        report.problem("architecture", str(error))
        return None
    names = config.get("architectures")
    name = next(name for name in names if name in FAMILIES) if isinstance(names, list) else ""
    experts = next((layer.experts for layer in spec.layers if layer.experts is not None), None)
    mixture = "" if experts is None else f"{experts.count} experts of {experts.inner_size}, {experts.top_k} a token, "
    report.fact(
        "architecture",
        f"{name}: {spec.num_layers} layers, hidden size {spec.hidden_size}, {spec.num_heads} heads of {spec.head_dim}, "
        f"{spec.num_kv_heads} for keys and values, {mixture}context {spec.context_length}",
    )
    return spec


def _dtype(spec: ModelSpec, wanted: Wanted, entries: Mapping[str, TensorEntry], report: Report) -> str:
    dtype = wanted.dtype
    if dtype == "auto":
        largest = max(entries.values(), key=lambda entry: entry.num_bytes, default=None)
        stored = "bfloat16" if largest is None else _DTYPES.get(largest.dtype, "float32")
        dtype = spec.dtype or stored
    capability = wanted.device.capability
    if dtype == "bfloat16" and capability is not None:
        lacking = lacks_bfloat16(wanted.device.name, capability)
        if lacking is not None:
            report.problem("dtype", lacking, USE_HALF)
    report.fact("dtype", dtype)
    return dtype


def _kv_dtype(folder: ModelFolder, dtype: str, wanted: Wanted, report: Report) -> str:
    """The pool's type. Whether an engine with --device auto has a GPU is not known here; then it is not judged."""
    active = active_dtype(dtype, wanted.device)
    device = wanted.device
    on_cpu = device.kind == "cpu" or device.memory is None
    lacking = None if device.capability is None else lacks_fp8(device.name, device.capability)
    quantization = None
    with suppress(ModelError):  # reported with the weights
        quantization = read_quantization(folder, None)
    try:
        found = kv_cache_dtype(wanted.kv_cache_dtype, quantization, active=active, on_cpu=on_cpu, lacks_fp8=lacking)
    except ModelError as error:
        report.problem("KV cache", str(error))
        return active
    if found != active:
        report.fact("KV cache", found)
    return found


def _check_generation(folder: ModelFolder, config: dict[str, object], spec: ModelSpec | None, report: Report) -> None:
    about, remedy = "generation config", "Correct the field, or remove it."
    try:
        generation = read_generation_config(folder)
        if spec is not None and not eos_ids(generation, config, spec.vocab_size):
            report.warn(about, "No eos_token_id: answers end at max_tokens alone.")
    except ModelError as error:
        report.problem(about, str(error), remedy)
        return
    try:
        generation_defaults(generation)
    except ModelError as error:
        report.problem(about, str(error), remedy)
