"""The variants of GPTQ, AWQ and compressed-tensors that are read, out of a checkpoint's description.

Knows nothing of torch, so that a look at a model can ask before anything is loaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from engine.loading.quantization import Quantization
from engine.loading.store import ModelError

_GPTQ_BITS = (2, 3, 4, 8)

AWQ_BITS = 4

#: Where compressed-tensors' rotations are in the weights.
_OFFLINE = {"weight_input", "weight_output"}


@dataclass(frozen=True, slots=True)
class GPTQVariant:
    """`group_size` -1 is one group of all inputs; zero points are stored less one in the format's first version."""

    bits: int
    group_size: int
    act_order: bool
    zeros_less_one: bool


@dataclass(frozen=True, slots=True)
class AWQVariant:
    """`group_size` -1 is one group of all inputs."""

    group_size: int


def gptq_variant(described: Quantization) -> GPTQVariant:
    """Raises ModelError for a variant that is not supported."""
    bits, group_size = described.integer("bits"), described.integer("group_size", -1)
    if bits not in _GPTQ_BITS:
        raise described.error("bits", "must be 2, 3, 4 or 8")
    if group_size != -1 and group_size < 1:
        raise described.error("group_size", "must be positive, or -1 for one group")
    version = described.text("checkpoint_format", described.text("format", "gptq"))
    if version not in ("gptq", "gptq_v2"):
        raise described.error("checkpoint_format", "must be gptq or gptq_v2")
    return GPTQVariant(bits, group_size, described.flag("desc_act", False), zeros_less_one=version == "gptq")


def gptq_overrides(described: Quantization) -> tuple[tuple[re.Pattern[str], GPTQVariant], ...]:
    """Modules that are quantized otherwise: patterns that match the beginnings of their names, the first that does
    decides. This is GPTQModel's `dynamic`; what it leaves plain (patterns after "-:") is told by the tensors.
    Raises ModelError for a variant that is not supported.
    """
    if not described.values.get("dynamic"):
        return ()
    dynamic, found = described.inner("dynamic"), []
    for pattern in dynamic.values:
        if not pattern.startswith("-:"):
            changed = replace(dynamic.inner(pattern), values={**described.values, **dynamic.inner(pattern).values})
            found.append((module_pattern(dynamic, pattern.removeprefix("+:")), gptq_variant(changed)))
    return tuple(found)


def module_pattern(described: Quantization, text: str) -> re.Pattern[str]:
    """A pattern of a description. Raises ModelError when it is none."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ModelError(f"{described.source}: {text!r} is no pattern of module names: {error}.") from error


def awq_variant(described: Quantization) -> AWQVariant:
    """Raises ModelError for a variant that is not supported. Older AutoAWQ has its own names for two fields."""
    bits = described.integer("bits", described.integer("w_bit", AWQ_BITS))
    group_size = described.integer("group_size", described.integer("q_group_size", 128))
    if bits != AWQ_BITS:
        raise described.error("bits" if "bits" in described.values else "w_bit", "must be 4")
    if group_size != -1 and group_size < 1:
        raise described.error("group_size", "must be positive, or -1 for one group")
    if described.text("version", "gemm") != "gemm":
        raise described.error("version", "must be GEMM; quantize again with that version")
    if not described.flag("zero_point", True):
        raise described.error("zero_point", "must be true; quantize again with zero points")
    return AWQVariant(group_size)


def check_transforms(described: Quantization) -> None:
    """Raise ModelError where compressed-tensors would have activations rotated as the model runs (SpinQuant's R3 and
    R4, QuIP): without it the model answers nonsense. Rotations of weights are in the weights.
    """
    if not described.values.get("transform_config"):
        return
    groups = described.inner("transform_config").inner("config_groups")
    for name in groups.values:
        group = groups.inner(name)
        steps = group.values.get("apply")
        if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
            raise group.error("apply", "must be a list of objects")
        locations = {str(step.get("location")) for step in steps}
        if online := locations - _OFFLINE:
            raise ModelError(
                f"{group.source}: activations are rotated as the model runs ({', '.join(sorted(online))}), which is "
                f"not supported; quantize again with rotations of weights alone (SpinQuant's R1 and R2)."
            )
