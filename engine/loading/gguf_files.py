"""Weights in a GGUF file beside a model's config.json and tokenizer, under the names the config's family has.

Quantized tensors (Q4_0 to Q8_0, K-quants and all else that the `gguf` package knows) become float32.
llama.cpp changes two things when it writes a model: the rows of llama's query and key projections
stand in the order of interleaved rotation, and Gemma's norms have one added.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import orjson
import torch
from torch import Tensor

from engine.loading.formats import Extent, Region, TensorEntry, slices
from engine.loading.store import ModelError, ModelFolder

if TYPE_CHECKING:
    from gguf import ReaderTensor

#: `general.architecture` of the files whose tensors are those of a family here, to what is special about them.
_INTERLEAVED = frozenset({"llama"})
_NORMS_PLUS_ONE = frozenset({"gemma2", "gemma3"})

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_PHI3_LAYER = _LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

#: What the tensors of a layer are called, by architecture.
_LAYERS = {
    "gemma2": _GEMMA_LAYER,
    "gemma3": _GEMMA_LAYER,
    "llama": _LAYER,
    "phi3": _PHI3_LAYER,
    "qwen2": _LAYER,
    "qwen3": _LAYER,
}

#: Frequencies of llama3 positions and factors of longrope, which the config gives as well.
_UNUSED = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})

_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


class GGUFFile:
    """One file. Raises ModelError for a file that is cut, or of an architecture that is not known here."""

    def __init__(self, file: Path, folder: ModelFolder) -> None:
        self._file = file
        reader = _reader(file)
        field = reader.fields.get("general.architecture")
        self._architecture = str(field.contents()) if field is not None else "unnamed"
        if self._architecture not in _LAYERS:
            raise ModelError(
                f"{file}: general.architecture is {self._architecture!r}; GGUF is read for {', '.join(_LAYERS)}."
            )
        self._heads = _head_counts(folder) if self._architecture in _INTERLEAVED else {}
        self._tensors: dict[str, ReaderTensor] = {
            self._name(tensor.name): tensor for tensor in reader.tensors if tensor.name not in _UNUSED
        }
        self.entries = {name: _entry(file, tensor) for name, tensor in self._tensors.items()}

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """float32, also of a tensor stored in fewer bits; the entry says F32. A part is cut out of the whole, whose
        rows may have another order in the file.
        """
        from gguf import dequantize

        stored = self._tensors[name]
        values: npt.NDArray[np.float32] = dequantize(stored.data, stored.tensor_type).astype(np.float32)
        tensor = torch.from_numpy(values)
        for projection, num_heads in self._heads.items():
            if f".{projection}." in name:
                tensor = _half_split(tensor, num_heads)
        if self._architecture in _NORMS_PLUS_ONE and "norm" in name:
            tensor = tensor - 1
        return tensor if region is None else tensor[slices(region)].contiguous()

    def extent(self, name: str, region: Region | None = None) -> Extent | None:
        del name, region  # what is read is computed
        return None

    def header(self) -> bytes:
        described = {name: [int(tensor.tensor_type), tensor.shape.tolist()] for name, tensor in self._tensors.items()}
        return orjson.dumps(described, option=orjson.OPT_SORT_KEYS)

    def _name(self, name: str) -> str:
        """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
        match = _NAME.fullmatch(name)
        if match is not None:
            layer, module, suffix = match.groups()
            names = _TOP if layer is None else _LAYERS[self._architecture]
            if module in names:
                return (
                    f"{names[module]}.{suffix}" if layer is None else f"model.layers.{layer}.{names[module]}.{suffix}"
                )
        raise ModelError(f"{self._file} holds {name}, which is no tensor of the architecture {self._architecture}.")


def _reader(file: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError(f"{file} needs the package gguf: pip install gguf.") from error
    try:
        return GGUFReader(file)
    except Exception as error:  # the package raises whatever numpy does
        raise ModelError(f"{file} is not a GGUF file, or was not copied whole ({error}).") from error


def _entry(file: Path, tensor: ReaderTensor) -> TensorEntry:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return TensorEntry(file=file, dtype="F32", shape=shape, num_bytes=int(tensor.n_bytes))


def _head_counts(folder: ModelFolder) -> dict[str, int]:
    """How many heads the rows of a projection belong to, by config.json."""
    config = folder.read_object("config.json")
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads < 1 or kv_heads < 1:
        raise ModelError("config.json: num_attention_heads and num_key_value_heads must be positive integers.")
    return {"q_proj": heads, "k_proj": kv_heads}


def _half_split(values: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from pairs (0, half), (1, half + 1), … back to first half, second half."""
    pairs = values.view(num_heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
