"""Qwen's first generation in plain torch, after its publishers' modeling_qwen.py: the oracle of the tests.

It computes a whole sequence at once, as that program does without a cache, knows nothing of the engine, and
stays out of transformers, which has no such model.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class Logits:
    logits: Tensor  # [1, T, vocab_size]


class QwenReference:
    """`config` has the names of a published config.json; unless given, weights are random, of `initializer_range`."""

    def __init__(self, config: dict[str, object], weights: dict[str, Tensor] | None = None) -> None:
        self.config = {"architectures": ["QWenLMHeadModel"], "model_type": "qwen", "torch_dtype": "float32"} | config
        self._weights = dict(self._random()) if weights is None else weights

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self._weights, folder / "model.safetensors", metadata={"format": "pt"})

    def __call__(self, tokens: Tensor, *, prompt_length: int | None = None) -> Logits:
        """Logits after every token of tokens [1, T]. The rope's base goes by the prompt, the first pass of a
        generation, whose length is `prompt_length` (T when None).
        """
        (ids,) = tokens
        x = self._weights["transformer.wte.weight"][ids]
        cosines, sines = self._rotation(len(ids), prompt_length or len(ids))
        for number in range(self._number("num_hidden_layers")):
            prefix = f"transformer.h.{number}."
            x = x + self._attention(self._norm(x, prefix + "ln_1"), prefix + "attn.", cosines, sines)
            normed = self._norm(x, prefix + "ln_2")
            a1, a2 = self._linear(normed, prefix + "mlp.w1"), self._linear(normed, prefix + "mlp.w2")
            x = x + self._linear(a1 * (a2 * torch.sigmoid(a2)), prefix + "mlp.c_proj")
        return Logits((self._norm(x, "transformer.ln_f") @ self._weights["lm_head.weight"].t())[None])

    def greedy_ids(self, prompt: list[int], num_new: int, masked: int) -> list[int]:
        """The `num_new` ids that continue the prompt, `masked` never among them."""
        ids = list(prompt)
        for _ in range(num_new):
            logits = self(torch.tensor([ids]), prompt_length=len(prompt)).logits[0, -1]
            logits[masked] = -torch.inf
            ids.append(int(logits.argmax()))
        return ids[len(prompt) :]

    def _attention(self, x: Tensor, prefix: str, cosines: Tensor, sines: Tensor) -> Tensor:
        length, heads = len(x), self._number("num_attention_heads")
        query, key, value = (
            part.view(length, heads, -1).transpose(0, 1) for part in self._linear(x, prefix + "c_attn").chunk(3, dim=-1)
        )
        query, key = _rotated(query, cosines, sines), _rotated(key, cosines, sines)
        trained = self._number("seq_length")
        if self.config["use_logn_attn"] and length > trained:
            places = range(1, length + 1)
            query = query * torch.tensor([math.log(i, trained) if i > trained else 1.0 for i in places])[:, None]
        scores = query @ key.transpose(1, 2) / math.sqrt(self._number("kv_channels"))
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        mixed = scores.softmax(-1) @ value
        return self._linear(mixed.transpose(0, 1).reshape(length, -1), prefix + "c_proj")

    def _rotation(self, length: int, prompt_length: int) -> tuple[Tensor, Tensor]:
        """[length, kv_channels] each: the angles of half the dimensions, twice."""
        base, dim = float(self._number("rotary_emb_base")), self._number("kv_channels")
        if self.config["use_dynamic_ntk"]:
            alpha = max(1, 2 ** math.ceil(math.log(prompt_length / self._number("seq_length"), 2) + 1) - 1)
            base *= alpha ** (dim / (dim - 2))
        frequencies = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
        angles = torch.outer(torch.arange(length).float(), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + float(str(self.config["layer_norm_epsilon"])))
        return x * scale * self._weights[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self._weights[f"{name}.weight"].t()
        return y + self._weights[f"{name}.bias"] if f"{name}.bias" in self._weights else y

    def _random(self) -> list[tuple[str, Tensor]]:
        hidden, inner = self._number("hidden_size"), self._number("intermediate_size") // 2
        spread = float(str(self.config["initializer_range"]))
        found = []

        def linear(name: str, rows: int, columns: int, bias: bool) -> None:
            found.append((f"{name}.weight", torch.randn(rows, columns) * spread))
            if bias:
                found.append((f"{name}.bias", torch.randn(rows) * 0.3))

        def norm(name: str) -> None:
            found.append((f"{name}.weight", 1 + torch.randn(hidden) * 0.1))

        biases = not self.config["no_bias"]
        linear("transformer.wte", self._number("vocab_size"), hidden, False)
        for number in range(self._number("num_hidden_layers")):
            prefix = f"transformer.h.{number}."
            norm(prefix + "ln_1")
            linear(prefix + "attn.c_attn", 3 * hidden, hidden, True)
            linear(prefix + "attn.c_proj", hidden, hidden, biases)
            norm(prefix + "ln_2")
            linear(prefix + "mlp.w1", inner, hidden, biases)
            linear(prefix + "mlp.w2", inner, hidden, biases)
            linear(prefix + "mlp.c_proj", hidden, inner, biases)
        norm("transformer.ln_f")
        linear("lm_head", self._number("vocab_size"), hidden, False)
        return found

    def _number(self, name: str) -> int:
        return int(str(self.config[name]))


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-high, low), dim=-1) * sines
