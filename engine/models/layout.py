"""All tensors a model is made of, by its spec: what `decoder` takes, without building it.

A test holds the two together for every family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.models.spec import ExpertNames, ExpertsSpec, LayerSpec, ModelSpec, WeightNames, named_rows


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer's weight [rows, columns], stored as its format likes, and its bias [rows] if it has one.

    On several devices `by_rows` matrices are divided by rows, the others by columns.
    """

    name: str
    rows: int
    columns: int
    bias: bool
    by_rows: bool


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """`plain` are the tensors that no format changes, by name: embedding and norms. `matrices` include the head where
    it is not the embedding.
    """

    matrices: tuple[Matrix, ...]
    plain: dict[str, tuple[int, ...]]


def layout_of(spec: ModelSpec, names: WeightNames) -> ModelLayout:
    """The layout of a model whose checkpoint has these names."""
    prefixes = [names.layer.format(number) for number in range(spec.num_layers)]
    table = (spec.vocab_size, spec.hidden_size)
    plain: dict[str, tuple[int, ...]] = {f"{names.embedding}.weight": table}
    plain[f"{names.final_norm}.weight"] = (spec.hidden_size,)
    for prefix in prefixes:
        plain |= {f"{prefix}{name}.weight": (size,) for name, size in _norms(spec, names)}
    layers = zip(spec.layers, prefixes, strict=True)
    matrices = [matrix for layer, prefix in layers for matrix in _matrices(spec, layer, names, prefix)]
    if not spec.tied_head:
        matrices.append(Matrix(names.head, *table, bias=False, by_rows=True))
    return ModelLayout(tuple(matrices), plain)


def _matrices(spec: ModelSpec, layer: LayerSpec, names: WeightNames, prefix: str) -> Iterator[Matrix]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    for name, rows in named_rows(names.qkv, spec.qkv_rows):
        yield Matrix(prefix + name, rows, hidden, spec.qkv_bias, by_rows=True)
    yield Matrix(prefix + names.output, hidden, spec.qkv_rows[0], spec.output_bias, by_rows=False)
    if layer.experts is not None:
        yield from _expert_matrices(layer.experts, hidden, names.experts, prefix)
        return
    for name, rows in named_rows(names.gate_up, (inner, inner)):
        yield Matrix(prefix + name, rows, hidden, spec.mlp_bias, by_rows=True)
    yield Matrix(prefix + names.down, hidden, inner, spec.mlp_bias, by_rows=False)


def _expert_matrices(experts: ExpertsSpec, hidden: int, names: ExpertNames, prefix: str) -> Iterator[Matrix]:
    yield Matrix(prefix + names.router, experts.count, hidden, bias=False, by_rows=True)
    for number in range(experts.count):
        for name in (names.gate, names.up):
            yield Matrix(prefix + name.format(number), experts.inner_size, hidden, bias=False, by_rows=True)
        yield Matrix(prefix + names.down.format(number), hidden, experts.inner_size, bias=False, by_rows=False)


def _norms(spec: ModelSpec, names: WeightNames) -> Iterator[tuple[str, int]]:
    """Name and size of each norm of a layer."""
    yield names.attention_norm, spec.hidden_size
    yield names.mlp_norm, spec.hidden_size
    if names.query_norm is not None and names.key_norm is not None:
        yield names.query_norm, spec.head_dim
        yield names.key_norm, spec.head_dim
    for name in (names.output_norm, names.down_norm):
        if name is not None:
            yield name, spec.hidden_size
