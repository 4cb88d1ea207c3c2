"""Do the tensors that the files hold agree with config.json?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from engine.loading.formats import TensorEntry
from engine.models.layout import Matrix, ModelLayout
from engine.models.spec import Family, ModelSpec
from engine.preflight.quantization import Shapes, StoredLayout
from engine.preflight.report import Report

_ABOUT = "tensors"
_REMEDY = "config.json and weights are of different models: take both from one source."

#: Types that plain weights may be stored in, as in `engine.loading.weights`.
_PLAIN_TYPES = ("F32", "BF16", "F16")


def check_tensors(
    entries: Mapping[str, TensorEntry],
    layout: ModelLayout,
    stored: StoredLayout | None,
    family: Family,
    spec: ModelSpec,
    report: Report,
) -> None:
    """Every tensor that the model needs is there in its shape, and there is no other."""
    other = None if stored is None else stored.other_groups(layout.matrices, entries)
    if other is not None:  # every shape would be wrong for this one reason
        report.problems.append(other)
        return
    expected = dict(layout.plain)
    modules = defaultdict[str, Shapes](dict)
    for name, tensor in entries.items():
        modules[name.rpartition(".")[0]][name] = tensor.shape
    for matrix in layout.matrices:
        expected |= _of_matrix(matrix, entries, modules[matrix.name], stored)
    problems = []
    for name, shape in expected.items():
        entry = entries.get(name)
        if entry is None:
            problems.append(f"No file holds {name} {list(shape)}, which config.json calls for.")
        elif entry.shape != shape:
            problems.append(
                f"{entry.file.name}: {name} has the shape {list(entry.shape)}; config.json calls for {list(shape)}."
            )
        elif name in layout.plain and entry.dtype not in _PLAIN_TYPES:
            problems.append(f"{entry.file.name}: {name} is {entry.dtype}; supported are {', '.join(_PLAIN_TYPES)}.")
    ignored = family.ignored
    if spec.tied_head:
        ignored = (*ignored, f"{family.names.head}.weight")
    if stored is not None:
        ignored = (*ignored, *stored.optional)
    # Older GPTQ tools write a bias of zeros for every layer; whether these are zeros is seen when they are read.
    biases = set() if stored is None else {f"{matrix.name}.bias" for matrix in layout.matrices}
    left = [name for name in sorted(entries.keys() - expected.keys() - biases) if not name.endswith(ignored)]
    problems += [f"{entries[name].file.name} holds {name}, which config.json does not call for." for name in left]
    report.alike(_ABOUT, problems, _REMEDY)
    if not problems:
        report.fact(_ABOUT, f"{len(expected)}, each in the shape that config.json calls for")


def _of_matrix(
    matrix: Matrix, entries: Mapping[str, TensorEntry], found: Shapes, stored: StoredLayout | None
) -> Shapes:
    """Names and shapes of what one linear layer is stored as; `found` is what there is of it."""
    bias: Shapes = {f"{matrix.name}.bias": (matrix.rows,)} if matrix.bias else {}
    plain = entries.get(f"{matrix.name}.weight")
    if stored is None or (plain is not None and plain.dtype in _PLAIN_TYPES):  # it was left as it is
        return {f"{matrix.name}.weight": (matrix.rows, matrix.columns), **bias}
    shapes = stored.tensors(matrix)
    if shapes is None:
        return found
    return {**{f"{matrix.name}.{name}": shape for name, shape in shapes.items()}, **bias}
