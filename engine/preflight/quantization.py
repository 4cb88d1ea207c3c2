"""Is the quantized layout of a checkpoint one that is served, and what are its matrices stored as?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.loading.formats import TensorEntry
from engine.loading.quantization import NAMES, Quantization, check_described, read_quantization
from engine.loading.store import ModelError, ModelFolder
from engine.models.layout import Matrix
from engine.preflight.report import Problem, Report
from engine.quant import UNUSED
from engine.quant.variants import AWQ_BITS, awq_variant, check_transforms, gptq_overrides, gptq_variant

_ABOUT = "quantization"

#: Kinds with a scale for a group of columns: the ending of the tensor, and its dimension of groups.
_GROUPED = {"gptq": ("scales", 0), "awq": ("scales", 0), "pack-quantized": ("weight_scale", 1)}

#: The one there is; what it means for memory is in the plan as well.
_KERNEL = "kernel: weights are unpacked at load and take the memory of plain ones"

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """The tensors of a quantized matrix; `source` is where this stands. `group_size` is the number of columns that
    share a scale, 0 all of a row; `block` is (rows, columns) of those that share one in two dimensions. A `kind`
    that is not known here has no shapes, so that they are not compared.
    """

    kind: str
    bits: int
    source: str
    group_size: int = 0
    block: tuple[int, int] | None = None
    act_order: bool = False

    #: Endings of tensors that may be there beside those of `tensors`.
    optional = (".g_idx", ".weight_g_idx", ".weight_zero_point", ".weight_shape", *UNUSED)

    def __str__(self) -> str:
        shared = f"groups of {self.group_size}" if self.group_size else "a scale a row"
        if self.block:
            shared = f"blocks of {self.block[0]}×{self.block[1]}"
        return f"{self.bits} bit, {shared}{', act-order' if self.act_order else ''}"

    def tensors(self, matrix: Matrix) -> Shapes | None:
        """Endings of names, and shapes; None where they are not known."""
        rows, columns = matrix.rows, matrix.columns
        groups = math.ceil(columns / self.group_size) if self.group_size else 1
        packed_rows, packed_columns = (math.ceil(size * self.bits / 32) for size in (rows, columns))
        match self.kind:
            case "gptq":
                return {"qweight": (packed_columns, rows), "qzeros": (groups, packed_rows), "scales": (groups, rows)}
            case "awq":
                return {"qweight": (columns, packed_rows), "qzeros": (groups, packed_rows), "scales": (groups, rows)}
            case "pack-quantized":
                return {"weight_packed": (rows, packed_columns), "weight_scale": (rows, groups)}
            case "fp8" if self.block:
                return {"weight": (rows, columns), "weight_scale_inv": self._blocks(matrix)}
            case "int-quantized" | "float-quantized" | "naive-quantized":
                return {
                    "weight": (rows, columns),
                    "weight_scale": self._blocks(matrix) if self.block else (rows, groups),
                }
        return None

    def other_groups(self, matrices: Iterable[Matrix], entries: Mapping[str, TensorEntry]) -> Problem | None:
        """What to say where scales are for groups of another size than the description's; the first matrix tells."""
        ending, dimension = _GROUPED.get(self.kind, ("", 0))
        for matrix in matrices:
            entry = entries.get(f"{matrix.name}.{ending}")
            shapes = self.tensors(matrix)
            if entry is None or shapes is None or len(entry.shape) != 2:
                continue
            groups, expected = entry.shape[dimension], shapes[ending][dimension]
            if groups == expected or not groups:
                return None
            size = math.ceil(matrix.columns / groups)
            return Problem(
                _ABOUT,
                f"{self.source} says group_size {self.group_size or -1}, with which {matrix.columns} columns have "
                f"{expected} scales; {entry.file.name}: {matrix.name}.{ending} has {groups}, one for {size} columns.",
                f"Set group_size to {size}, or take description and weights from one source.",
            )
        return None

    def _blocks(self, matrix: Matrix) -> tuple[int, int]:
        assert self.block is not None
        return math.ceil(matrix.rows / self.block[0]), math.ceil(matrix.columns / self.block[1])


def check_quantization(
    folder: ModelFolder, tensors: Iterable[str], asked: str | None, report: Report
) -> StoredLayout | None:
    """How quantized matrices are stored; None where they are plain, one of no known kind where that is the problem.

    `tensors` are the names of what the files hold, `asked` is --quantization.
    """
    try:
        found = read_quantization(folder, asked)
        check_described(found, tensors, folder)
        layout = None if found is None or not (found.values and found.of_weights) else _layout(found)
    except ModelError as error:
        report.problem(_ABOUT, str(error))
        return StoredLayout("", 0, "")
    if found is None:
        report.fact(_ABOUT, "none")
    elif not found.of_weights:
        report.fact(_ABOUT, f"none of weights; scales of keys and values ({found.source})")
        return StoredLayout("", 16, found.source)
    elif layout is None:
        report.fact(_ABOUT, f"{NAMES[found.method]}, made while the weights are loaded")
    else:
        report.fact(_ABOUT, f"{NAMES[found.method]} ({found.source}): {layout}; {_KERNEL}")
    return layout


def _layout(found: Quantization) -> StoredLayout:
    if found.method == "compressed-tensors":
        return _compressed(found)
    if found.method == "fp8":
        return StoredLayout("fp8", 8, found.source, block=found.sizes("weight_block_size"))
    if found.method == "awq":
        return StoredLayout("awq", AWQ_BITS, found.source, max(0, awq_variant(found).group_size))
    variant = gptq_variant(found)
    kind = "" if gptq_overrides(found) else "gptq"  # shapes are not compared where they differ by module
    return StoredLayout(kind, variant.bits, found.source, max(0, variant.group_size), act_order=variant.act_order)


def _compressed(found: Quantization) -> StoredLayout:
    """By the one group of modules that tools write; with several of them shapes are not compared."""
    check_transforms(found)
    groups = found.inner("config_groups")
    group = groups.inner(next(iter(groups.values), ""))
    weights = group.inner("weights")
    kind = group.text("format", found.text("format", ""))
    strategy = weights.text("strategy", "channel")
    known = len(groups.values) == 1 and strategy in ("channel", "group", "block")
    return StoredLayout(
        kind if known else "",
        weights.integer("num_bits"),
        weights.source,
        weights.integer("group_size", 0) if strategy == "group" else 0,
        weights.sizes("block_structure") if strategy == "block" else None,
        act_order=weights.values.get("actorder") is not None,
    )
