"""The one decoder: every family is this with another ModelSpec and other weight names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import kernels
from engine.layers.attention import Attention, ForwardBatch, LayerCache, log_growth
from engine.layers.experts import Experts
from engine.layers.linear import Embedding, Head, Linear
from engine.layers.norm import RMSNorm
from engine.layers.rope import rope_table
from engine.loading.weights import Weights
from engine.models.spec import ExpertsSpec, LayerSpec, ModelSpec, WeightNames, named_rows
from engine.quant import ExpertParts, LinearMethod, LinearPart
from engine.quant.unquantized import UnquantizedWeight


@dataclass(frozen=True, slots=True, eq=False)
class _Modules:
    """Makes the modules of a decoder out of its weights. `dtype` is that of activations."""

    spec: ModelSpec
    names: WeightNames
    reader: Weights
    method: LinearMethod
    dtype: torch.dtype

    def linear(self, prefix: str, bias: bool, *parts: tuple[str, int, int]) -> Linear:
        rows = [LinearPart(prefix + name, num_out, num_in) for name, num_out, num_in in parts]
        return Linear(self.reader, self.method, rows, bias=bias)

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._norm_weight(name, self.spec.hidden_size), self.spec.norm_eps)

    def head_norms(self, prefix: str) -> kernels.HeadNorms | None:
        query, key, size = self.names.query_norm, self.names.key_norm, self.spec.head_dim
        if query is None or key is None:
            return None
        return kernels.HeadNorms(
            self._norm_weight(prefix + query, size), self._norm_weight(prefix + key, size), self.spec.norm_eps
        )

    def branch_end(self, prefix: str, bias: bool, part: tuple[str, int, int], norm: str | None) -> BranchEnd:
        return BranchEnd(self.linear(prefix, bias, part), None if norm is None else self.norm(prefix + norm))

    def mlp(
        self, layer: LayerSpec, prefix: str
    ) -> Callable[[RMSNorm, Tensor | None, Tensor], tuple[Tensor | None, Tensor]]:
        """A layer's MLP or experts: takes its norm and what that takes, answers as `BranchEnd` does."""
        if layer.experts is not None:
            return self._experts(layer.experts, prefix)
        spec, names = self.spec, self.names
        hidden, inner = spec.hidden_size, spec.intermediate_size
        gate_up = [(name, rows, hidden) for name, rows in named_rows(names.gate_up, (inner, inner))]
        return GatedMLP(
            self.linear(prefix, spec.mlp_bias, *gate_up),
            spec.activation,
            self.branch_end(prefix, spec.mlp_bias, (names.down, hidden, inner), names.down_norm),
        )

    def _experts(self, experts: ExpertsSpec, prefix: str) -> Experts:
        hidden, inner, names = self.spec.hidden_size, experts.inner_size, self.names.experts
        parts = [
            ExpertParts(
                LinearPart(prefix + names.gate.format(number), inner, hidden),
                LinearPart(prefix + names.up.format(number), inner, hidden),
                LinearPart(prefix + names.down.format(number), hidden, inner),
            )
            for number in range(experts.count)
        ]
        router = LinearPart(prefix + names.router, experts.count, hidden)
        top_k, renormalize = experts.top_k, experts.renormalize
        return Experts(self.reader, self.method, router, parts, top_k=top_k, renormalize=renormalize)

    def _norm_weight(self, name: str, size: int) -> Tensor:
        weight = self.reader.take(f"{name}.weight", (size,))
        return weight.float() + 1.0 if self.spec.norms_from_one else weight.to(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class BranchEnd:
    """The linear layer at the end of attention or MLP, normed where the family does that."""

    linear: Linear
    norm: RMSNorm | None

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor | None, Tensor]:
        """What is still to be added to the residual, and the residual; or None and their sum."""
        if self.norm is None:
            return self.linear.added(x, residual)
        return self.norm(self.linear(x), None)[0], residual


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP:
    """down(activation(gate(y)) * up(y)), y being the normed sum of x and residual."""

    gate_up: Linear
    activation: kernels.Activation
    down: BranchEnd

    def __call__(self, norm: RMSNorm, x: Tensor | None, residual: Tensor) -> tuple[Tensor | None, Tensor]:
        return self.down(*self.gate_up.gated_after(norm, x, residual, self.activation))


class DecoderLayer:
    """Attention and MLP (or experts), each after a norm, each added to the residual."""

    def __init__(
        self, modules: _Modules, layer: LayerSpec, prefix: str, *, rope: Tensor, growth: Tensor | None
    ) -> None:
        spec, names = modules.spec, modules.names
        hidden = spec.hidden_size
        self._attention_norm = modules.norm(prefix + names.attention_norm)
        qkv = [(name, rows, hidden) for name, rows in named_rows(names.qkv, spec.qkv_rows)]
        self._qkv = modules.linear(prefix, spec.qkv_bias, *qkv)
        self._attention = Attention(
            num_heads=spec.num_heads,
            scale=spec.attention_scale,
            window=layer.window,
            soft_cap=spec.score_soft_cap,
            rope=rope,
            norms=modules.head_norms(prefix),
            growth=growth,
        )
        output = (names.output, hidden, spec.qkv_rows[0])
        self._output = modules.branch_end(prefix, spec.output_bias, output, names.output_norm)
        self._mlp_norm = modules.norm(prefix + names.mlp_norm)
        self._mlp = modules.mlp(layer, prefix)

    def __call__(
        self,
        x: Tensor | None,
        residual: Tensor | None,
        batch: ForwardBatch,
        cache: LayerCache,
        rows: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """(output, residual) [num_tokens, hidden_size], the output None where it is added already. With `rows` of
        these alone; keys and values of all tokens are written."""
        qkv, residual = self._qkv.after(self._attention_norm, x, residual)
        x = self._attention(qkv, batch, cache)
        if rows is not None:
            x, residual = x.index_select(0, rows), residual.index_select(0, rows)
            if not len(rows):
                return None, residual
        x, residual = self._output(x, residual)
        return self._mlp(self._mlp_norm, x, residual)


class Decoder:
    """Takes its weights from `reader` as it is built. `dtype` is that of activations.

    Raises ModelError when the checkpoint does not match the spec.
    """

    def __init__(
        self,
        spec: ModelSpec,
        names: WeightNames,
        *,
        reader: Weights,
        method: LinearMethod,
        dtype: torch.dtype,
        num_positions: int,
    ) -> None:
        modules = _Modules(spec, names, reader, method, dtype)
        ropes = {layer.rope for layer in spec.layers}
        growth = log_growth(spec.log_queries_from, num_positions)
        growth = None if growth is None else growth.to(reader.device)
        tables = {rope: rope_table(rope, num_positions, spec.rotary_dim).to(reader.device) for rope in ropes}
        embedding = reader.take(f"{names.embedding}.weight", (spec.vocab_size, spec.hidden_size))
        if spec.tied_head:
            tied = kernels.pack_linear(embedding)
            self._embedding = Embedding(tied, dtype, spec.embedding_scale)
            self._head = Head(UnquantizedWeight(tied), spec.logit_soft_cap)
        else:
            head = LinearPart(names.head, spec.vocab_size, spec.hidden_size)
            self._embedding = Embedding(embedding, dtype, spec.embedding_scale)
            self._head = Head(method.load_logits(reader, head), spec.logit_soft_cap)
        self._layers = [
            DecoderLayer(modules, layer, names.layer.format(number), rope=tables[layer.rope], growth=growth)
            for number, layer in enumerate(spec.layers)
        ]
        self._final_norm = modules.norm(names.final_norm)

    def hidden(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        """Final hidden states of the sampled rows: [num_sampled, hidden_size]. Fills the caches."""
        x, residual = self.through_layers(self.embedded(batch), batch, caches)
        return self.final(x, residual, batch.sampled if batch.pruned is None else None)

    def embedded(self, batch: ForwardBatch) -> Tensor:
        """What enters the first layer: [num_tokens, hidden_size]."""
        return self._embedding(batch.ids, batch.start)

    def through_layers(
        self, embedded: Tensor, batch: ForwardBatch, caches: Sequence[LayerCache]
    ) -> tuple[Tensor | None, Tensor]:
        """(output, residual) of the last layer, as a layer answers them, of a batch to be `pruned` for its sampled
        rows alone. Reads ids nowhere, fills the caches."""
        x: Tensor | None = embedded
        residual: Tensor | None = None
        *layers, (last, last_cache) = zip(self._layers, caches, strict=True)
        for layer, cache in layers:
            x, residual = layer(x, residual, batch, cache)
        if batch.pruned is None:
            return last(x, residual, batch, last_cache)
        return last(x, residual, replace(batch, attention=batch.pruned), last_cache, batch.sampled)

    def final(self, x: Tensor | None, residual: Tensor, sampled: Tensor | None) -> Tensor:
        """Normed hidden states of the rows `sampled` (None: of all), from what the last layer answered."""
        if sampled is not None:
            residual = residual.index_select(0, sampled)
            x = None if x is None else x.index_select(0, sampled)
        return self._final_norm(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, hidden_size] → float32 [B, vocab_size]."""
        return self._head(hidden)
