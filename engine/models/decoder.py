"""The one decoder: every family is this with another ModelSpec and other weight names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import kernels
from engine.layers.attention import Attention, ForwardBatch, LayerCache
from engine.layers.linear import Embedding, Head, Linear
from engine.layers.norm import RMSNorm
from engine.layers.rope import rope_table
from engine.loading.weights import Weights
from engine.models.spec import ModelSpec, WeightNames
from engine.quant import LinearMethod, LinearPart


class DecoderLayer:
    """Attention and gated MLP, each after a norm, each added to the residual."""

    def __init__(
        self,
        spec: ModelSpec,
        names: WeightNames,
        prefix: str,
        *,
        reader: Weights,
        method: LinearMethod,
        dtype: torch.dtype,
        rope: Tensor,
    ) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

        def linear(bias: bool, *parts: tuple[str, int, int]) -> Linear:
            rows = [LinearPart(prefix + name, num_out, num_in) for name, num_out, num_in in parts]
            return Linear(reader, method, rows, bias=bias)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(reader.take(f"{prefix}{name}.weight", (hidden,)).to(dtype), spec.norm_eps)

        self._attention_norm = norm(names.attention_norm)
        self._qkv = linear(
            spec.qkv_bias, (names.query, q_size, hidden), (names.key, kv_size, hidden), (names.value, kv_size, hidden)
        )
        self._attention = Attention(num_heads=spec.num_heads, head_dim=spec.head_dim, rope=rope)
        self._output = linear(spec.output_bias, (names.output, hidden, q_size))
        self._mlp_norm = norm(names.mlp_norm)
        self._gate_up = linear(spec.mlp_bias, (names.gate, inner, hidden), (names.up, inner, hidden))
        self._down = linear(spec.mlp_bias, (names.down, hidden, inner))

    def __call__(
        self, x: Tensor | None, residual: Tensor | None, batch: ForwardBatch, cache: LayerCache
    ) -> tuple[Tensor | None, Tensor]:
        """(output, residual) [num_tokens, hidden_size], the output None where it is added already."""
        normed, residual = self._attention_norm(x, residual)
        x, residual = self._output.added(self._attention(self._qkv(normed), batch, cache), residual)
        normed, residual = self._mlp_norm(x, residual)
        return self._down.added(self._gate_up.gated(normed), residual)


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
        rope = rope_table(num_positions, spec.head_dim, spec.rope_theta).to(reader.device)
        embedding = reader.take(f"{names.embedding}.weight", (spec.vocab_size, spec.hidden_size))
        if spec.tied_head:
            tied = kernels.pack_linear(embedding)
            self._embedding, self._head = Embedding(tied, dtype), Head(tied)
        else:
            head = reader.take(f"{names.head}.weight", (spec.vocab_size, spec.hidden_size))
            self._embedding, self._head = Embedding(embedding, dtype), Head(kernels.pack_linear(head))
        self._layers = [
            DecoderLayer(spec, names, names.layer.format(number), reader=reader, method=method, dtype=dtype, rope=rope)
            for number in range(spec.num_layers)
        ]
        norm = reader.take(f"{names.final_norm}.weight", (spec.hidden_size,)).to(dtype)
        self._final_norm = RMSNorm(norm, spec.norm_eps)

    def hidden(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        """Final hidden states of the sampled rows: [num_sampled, hidden_size]. Fills the caches."""
        x: Tensor | None = self._embedding(batch.ids, batch.last_ids)
        residual: Tensor | None = None
        for layer, cache in zip(self._layers, caches, strict=True):
            x, residual = layer(x, residual, batch, cache)
        assert residual is not None, "a model has at least one layer"
        if batch.sampled is not None:
            residual = residual.index_select(0, batch.sampled)
            x = None if x is None else x.index_select(0, batch.sampled)
        return self._final_norm(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, hidden_size] → float32 [B, vocab_size]."""
        return self._head(hidden)
