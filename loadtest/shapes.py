"""Model folders of the shapes that GPU figures are quoted for: config, a tokenizer, and random weights if wanted.

What is measured depends on shapes alone. The tokenizer is a byte-level BPE of the model's whole vocabulary whose ids
all decode to text, so that each token of a stream is an event.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BYTES_A_SHARD = 5 * 10**9

#: Values that all weights are cut from: to draw as many as a model has costs more time than to write them.
_BLOCK = 1 << 24
_STD = 0.02
_ONE = 0x3F80  # 1.0 in bfloat16

_FIRST_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ."


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder; `qwen` has Qwen3's norms of queries and keys."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    rope_theta: float
    tied: bool
    qwen: bool

    @property
    def layer_params(self) -> int:
        """Weights of a layer's matrices."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads) + 3 * self.hidden * self.ffn

    @property
    def step_weight_bytes(self) -> int:
        """What a step reads of bfloat16 weights: all layers and the head."""
        return 2 * (self.layers * self.layer_params + self.vocab * self.hidden)

    @property
    def kv_bytes(self) -> int:
        """Of one token, in bfloat16."""
        return 4 * self.layers * self.kv_heads * self.head_dim

    def prefill_flops(self, length: int) -> float:
        """Of one prompt: the layers' products, causal attention, and the head for its last token."""
        products = 2.0 * self.layers * self.layer_params * length
        attention = 2.0 * self.layers * self.heads * self.head_dim * length**2
        return products + attention + 2.0 * self.vocab * self.hidden

    def config(self) -> dict[str, object]:
        """config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM" if self.qwen else "LlamaForCausalLM"],
            "model_type": "qwen3" if self.qwen else "llama",
            "hidden_act": "silu",
            "dtype": "bfloat16",
            "rms_norm_eps": 1e-6 if self.qwen else 1e-5,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied,
            "attention_bias": False,
            "eos_token_id": self.vocab - 1,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every weight, as the model's own library writes them."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for number in range(self.layers):
            at = f"model.layers.{number}"
            yield f"{at}.input_layernorm.weight", (self.hidden,)
            for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
                yield f"{at}.self_attn.{name}.weight", (rows, self.hidden)
            if self.qwen:
                yield f"{at}.self_attn.q_norm.weight", (self.head_dim,)
                yield f"{at}.self_attn.k_norm.weight", (self.head_dim,)
            yield f"{at}.self_attn.o_proj.weight", (self.hidden, q)
            yield f"{at}.post_attention_layernorm.weight", (self.hidden,)
            yield f"{at}.mlp.gate_proj.weight", (self.ffn, self.hidden)
            yield f"{at}.mlp.up_proj.weight", (self.ffn, self.hidden)
            yield f"{at}.mlp.down_proj.weight", (self.hidden, self.ffn)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)


#: Llama-3.1-8B, Qwen3-0.6B, and one small enough for a CPU's tests.
SHAPES = {
    "llama8b": Shape(4096, 32, 32, 8, 128, 14336, 128256, 131072, 500000.0, tied=False, qwen=False),
    "qwen06b": Shape(1024, 28, 16, 8, 128, 3072, 151936, 40960, 1000000.0, tied=True, qwen=True),
    "tiny": Shape(64, 2, 4, 2, 16, 128, 1024, 4096, 10000.0, tied=False, qwen=True),
}


def write_folder(shape: Shape, folder: Path) -> None:
    """Config and tokenizer: all that an engine with `--load-format dummy` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(shape.vocab)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))


def write_weights(shape: Shape, folder: Path) -> int:
    """model-*.safetensors and their index, random; returns their bytes."""
    normal = np.random.default_rng(0).standard_normal(_BLOCK, np.float32) * _STD
    block = (normal.view(np.uint32) >> 16).astype("<u2")  # the upper half of a float32 is a bfloat16
    shards = list(_shards(shape))
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / name, shard, block)
        places |= {tensor: name for tensor, _ in shard}
    total = sum(2 * _count(size) for _, size in shape.tensors())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _write_shard(path: Path, shard: list[tuple[str, tuple[int, ...]]], block: np.ndarray) -> None:
    """The format's own layout: length of the header, header, values. Matrices are cut from `block`, norms are ones."""
    header: dict[str, object] = {}
    end = 0
    for name, size in shard:
        begin, end = end, end + 2 * _count(size)
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, size in shard:
            left = _count(size)
            if len(size) == 1:
                file.write(np.full(left, _ONE, "<u2").tobytes())
                continue
            while left:
                left -= (written := min(left, len(block)))
                file.write(memoryview(block[:written]))


def _shards(shape: Shape) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    shard: list[tuple[str, tuple[int, ...]]] = []
    room = BYTES_A_SHARD
    for name, size in shape.tensors():
        needed = 2 * _count(size)
        if shard and needed > room:
            yield shard
            shard, room = [], BYTES_A_SHARD
        shard.append((name, size))
        room -= needed
    yield shard


def _count(size: Sequence[int]) -> int:
    count = 1
    for length in size:
        count *= length
    return count


def _tokenizer(vocab_size: int) -> dict[str, object]:
    """tokenizer.json: 256 bytes, then pairs and triples of characters, the last id is the end."""
    characters = _byte_characters()
    vocab = {character: number for number, character in enumerate(characters)}
    letters = [characters[ord(character)] for character in _FIRST_CHARACTERS]
    pairs = list(itertools.product(letters, letters))
    triples = ((first + second, third) for first, second in pairs for third in letters)
    merges = []
    for left, right in itertools.chain(pairs, triples):
        if len(vocab) == vocab_size - 1:
            break
        vocab[left + right] = len(vocab)
        merges.append([left, right])
    assert len(vocab) == vocab_size - 1, "the vocabulary has more ids than pairs and triples of characters"
    return {
        "version": "1.0",
        "added_tokens": [_added("<|end|>", vocab_size - 1)],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def _added(content: str, number: int) -> dict[str, object]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": True, **plain}


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m loadtest.shapes SHAPE FOLDER`: with weights."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.shapes", description="Write a model of random weights.")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(argv)
    write_folder(SHAPES[options.shape], options.folder)
    write_weights(SHAPES[options.shape], options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
