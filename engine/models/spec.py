"""What a decoder is built from: the numbers of a model, the names of its weights.

The decoder (`engine.models.decoder`) sees a ModelSpec only; a family makes one of config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace

from engine.layers.rope import Rope
from engine.models.config import ConfigFields
from kernels import Activation


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of `count` experts, gated MLPs of `inner_size`, of which `top_k` answer a token.

    Their weights are the softmax of the router's logits over all experts, or with `renormalize` over those chosen.
    """

    count: int
    top_k: int
    inner_size: int
    renormalize: bool


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """In what layers differ. `window` is how many positions a token sees, itself included; 0 is all. `experts` stand
    in the place of the MLP.
    """

    rope: Rope
    window: int = 0
    experts: ExpertsSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer with rotary positions, RMS norms and a gated MLP.

    `dtype` is the checkpoint's own ("float32", "bfloat16", "float16"), None when config.json does not
    say. `context_length` is in force unless another is asked for, at most `max_context_length`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # how many dimensions of a head the rope turns
    context_length: int
    max_context_length: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tied_head: bool
    dtype: str | None
    attention_scale: float  # of the products of queries and keys
    log_queries_from: int = 0  # `engine.layers.attention.log_growth` of queries, 0 for none
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = Activation.SILU
    embedding_scale: float = 1.0
    score_soft_cap: float = 0.0  # of attention, 0 for none: cap * tanh(score / cap)
    logit_soft_cap: float = 0.0
    norms_from_one: bool = False  # norms are stored less one, and multiply before rounding (Gemma)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def inner_sizes(self) -> set[int]:
        """Sizes of the MLPs and experts there are."""
        sizes = (self.intermediate_size if layer.experts is None else layer.experts.inner_size for layer in self.layers)
        return set(sizes)

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Rows of the projections to queries, keys and values."""
        keys = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, keys, keys


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """The router, and with one {} for the expert's number what a gated MLP is made of."""

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """What a checkpoint calls the modules of a decoder; those of a layer follow its `layer` prefix.

    Families that have them name the norms of every query and key head, and those of what attention
    and MLP answer. `qkv` and `gate_up` are one name where one matrix holds the rows of all.
    """

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}."  # with one {} for the layer's number
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str | None = None
    key_norm: str | None = None
    output: str = "self_attn.o_proj"
    output_norm: str | None = None
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    down_norm: str | None = None
    experts: ExpertNames = ExpertNames()
    final_norm: str = "model.norm"
    head: str = "lm_head"


def named_rows(names: tuple[str, ...], rows: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """Each name with its rows; a single one with all of them."""
    return ((names[0], sum(rows)),) if len(names) == 1 else tuple(zip(names, rows, strict=True))


@dataclass(frozen=True, slots=True)
class Family:
    """`spec` reads a config; `ignored` are endings of tensor names that old checkpoints carry in vain. `other_names`
    are those of checkpoints that have another router's.
    """

    spec: Callable[[ConfigFields], ModelSpec]
    names: WeightNames
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    other_names: WeightNames | None = None

    def named_by(self, tensors: Container[str]) -> Family:
        """The family with the names that a checkpoint of these tensors has."""
        other = self.other_names
        if other is None or f"{other.layer.format(0)}{other.experts.router}.weight" not in tensors:
            return self
        return replace(self, names=other)
