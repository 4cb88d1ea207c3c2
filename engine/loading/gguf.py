"""GGUF to a Hugging Face directory in bfloat16: llama architecture, SmolLM's byte-level tokenizer.

Needs the `gguf` package (extra `demo`) and numpy, not torch: the front door converts the demo
model before any engine runs. Two things differ between the formats beyond names: GGUF keeps the
rows of the query and key projections in interleaved rope order, and all tensors quantized.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor, dequantize

from engine.loading.store import ModelError
from engine.plan import Progress

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

#: GGUF's token types that are neither text nor bytes.
_CONTROL = 3
_USER_DEFINED = 4


class GGUFModel:
    """One GGUF file. Raises ModelError for an architecture or tokenizer other than the two above."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)
        self._fields = {name: field.contents() for name, field in self._reader.fields.items()}
        self._expect(path, "general.architecture", "llama")
        self._expect(path, "tokenizer.ggml.model", "gpt2")
        self._expect(path, "tokenizer.ggml.pre", "smollm")
        self._num_heads = int(self._fields["llama.attention.head_count"])
        self._num_kv_heads = int(self._fields["llama.attention.head_count_kv"])

    def _expect(self, path: Path, name: str, supported: str) -> None:
        found = self._fields.get(name)
        if found != supported:
            raise ModelError(f"{path.name}: {name} is {found!r}; only {supported!r} can be converted.")

    def convert(self, folder: Path, progress: Progress) -> None:
        """Write config, tokenizer and weights into the existing, empty `folder`."""
        _write_json(folder / "config.json", self._config())
        _write_json(folder / "generation_config.json", self._special_ids())
        _write_json(folder / "tokenizer.json", self._tokenizer())
        _write_json(folder / "tokenizer_config.json", self._tokenizer_config())
        self._write_weights(folder / "model.safetensors", progress)

    # --- weights ---------------------------------------------------------------------------------

    def _write_weights(self, path: Path, progress: Progress) -> None:
        """One safetensors file, tensor by tensor, so that only one is held in float32."""
        tensors = self._reader.tensors
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in tensors:
            start, end = end, end + 2 * int(tensor.n_elements)
            shape = [int(size) for size in reversed(tensor.shape)]  # GGUF lists the fastest dimension first
            header[_weight_name(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # keeps the data aligned
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            done = 0
            for tensor in tensors:
                values = _bfloat16(self._values(tensor))
                file.write(values.data)
                done += values.nbytes
                progress("converting the demo model", done, end)
            file.flush()
            os.fsync(file.fileno())

    def _values(self, tensor: ReaderTensor) -> npt.NDArray[np.float32]:
        values: npt.NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name.endswith("attn_q.weight"):
            return _half_split(values, self._num_heads)
        if tensor.name.endswith("attn_k.weight"):
            return _half_split(values, self._num_kv_heads)
        return values

    # --- config ----------------------------------------------------------------------------------

    def _special_ids(self) -> dict[str, object]:
        return {
            "bos_token_id": self._fields["tokenizer.ggml.bos_token_id"],
            "eos_token_id": self._fields["tokenizer.ggml.eos_token_id"],
            "pad_token_id": self._fields["tokenizer.ggml.padding_token_id"],
        }

    def _config(self) -> dict[str, object]:
        fields = self._fields
        tied = all(tensor.name != "output.weight" for tensor in self._reader.tensors)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": fields["llama.embedding_length"],
            "intermediate_size": fields["llama.feed_forward_length"],
            "num_hidden_layers": fields["llama.block_count"],
            "num_attention_heads": self._num_heads,
            "num_key_value_heads": self._num_kv_heads,
            "max_position_embeddings": fields["llama.context_length"],
            "rope_theta": fields["llama.rope.freq_base"],
            "rope_scaling": None,
            # Stored as float32: six digits give back the decimal that was meant.
            "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "vocab_size": len(fields["tokenizer.ggml.tokens"]),
            "tie_word_embeddings": tied,
            "torch_dtype": "bfloat16",
            **self._special_ids(),
        }

    # --- tokenizer -------------------------------------------------------------------------------

    def _added_tokens(self) -> Iterator[tuple[int, dict[str, object]]]:
        tokens, types = self._fields["tokenizer.ggml.tokens"], self._fields["tokenizer.ggml.token_type"]
        for token_id, (content, kind) in enumerate(zip(tokens, types, strict=True)):
            if kind in (_CONTROL, _USER_DEFINED):
                flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
                yield token_id, {"content": content, **flags, "special": True}

    def _tokenizer(self) -> dict[str, object]:
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        digits = {"type": "Digits", "individual_digits": True}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": token_id, **token} for token_id, token in self._added_tokens()],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
            "post_processor": None,
            "decoder": {**byte_level, "add_prefix_space": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: index for index, token in enumerate(self._fields["tokenizer.ggml.tokens"])},
                "merges": self._fields["tokenizer.ggml.merges"],
            },
        }

    def _tokenizer_config(self) -> dict[str, object]:
        tokens = self._fields["tokenizer.ggml.tokens"]
        bos, eos, pad, unknown = (
            tokens[self._fields[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos", "padding", "unknown")
        )
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self._fields["llama.context_length"],
            "bos_token": bos,
            "eos_token": eos,
            "pad_token": pad,
            "unk_token": unknown,
            "additional_special_tokens": [bos, eos],
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "chat_template": self._fields["tokenizer.chat_template"],
            "added_tokens_decoder": {str(token_id): token for token_id, token in self._added_tokens()},
        }


def _weight_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    if name in _TOP:
        return _TOP[name]
    _, layer, module, suffix = name.split(".")
    return f"model.layers.{layer}.{_LAYER[module]}.{suffix}"


def _half_split(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of each head from pairs (0, half), (1, half + 1), … back to first half, second half."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Finite float32 values rounded to nearest, ties to even, as bfloat16 bit patterns."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def _write_json(path: Path, value: dict[str, object]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
