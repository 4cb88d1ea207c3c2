from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.loading.formats import Checkpoint
from engine.loading.store import ModelError, ModelFolder

gguf = pytest.importorskip("gguf")

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 16, 64


def folder(path: Path, architecture: str, tensors: dict[str, torch.Tensor], stored: str = "F32") -> ModelFolder:
    """A GGUF file with `tensors` by its own names, matrices quantized as `stored`."""
    (path / "config.json").write_text(json.dumps({"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}))
    writer = gguf.GGUFWriter(path / "model.gguf", architecture)
    kind = gguf.GGMLQuantizationType[stored]
    for name, tensor in tensors.items():
        if tensor.dim() == 1 or stored == "F32":
            writer.add_tensor(name, tensor.numpy())
        else:
            writer.add_tensor(name, gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFolder(path)


def interleaved(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp's order: row 2i of a head is the i-th of its first half, row 2i + 1 the i-th of its second."""
    rows = []
    for head in weight.chunk(num_heads):
        half = len(head) // 2
        for place in range(half):
            rows += [head[place], head[half + place]]
    return torch.stack(rows)


@pytest.mark.parametrize(("architecture", "permuted"), [("llama", True), ("qwen2", False)])
def test_names_and_order_of_rows(tmp_path: Path, architecture: str, permuted: bool) -> None:
    query, key = torch.randn(HEADS * HEAD_DIM, HIDDEN), torch.randn(KV_HEADS * HEAD_DIM, HIDDEN)
    bias, norm = torch.randn(HEADS * HEAD_DIM), torch.randn(HIDDEN)
    tensors = {
        "token_embd.weight": torch.randn(7, HIDDEN),
        "blk.1.attn_q.weight": interleaved(query, HEADS) if permuted else query,
        "blk.1.attn_q.bias": interleaved(bias, HEADS) if permuted else bias,
        "blk.1.attn_k.weight": interleaved(key, KV_HEADS) if permuted else key,
        "blk.1.ffn_norm.weight": norm,
        "rope_freqs.weight": torch.ones(8),
    }
    checkpoint = Checkpoint(folder(tmp_path, architecture, tensors))
    expected = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.layers.1.self_attn.q_proj.weight": query,
        "model.layers.1.self_attn.q_proj.bias": bias,
        "model.layers.1.self_attn.k_proj.weight": key,
        "model.layers.1.post_attention_layernorm.weight": norm,
    }
    assert checkpoint.entries.keys() == expected.keys()
    for name, tensor in expected.items():
        assert checkpoint.entries[name].shape == tuple(tensor.shape)
        assert torch.equal(checkpoint.read(name), tensor), name


def test_fused_matrices_of_phi3(tmp_path: Path) -> None:
    tensors = {
        "blk.0.attn_qkv.weight": torch.randn(12, 8),
        "blk.0.ffn_up.weight": torch.randn(10, 8),
        "blk.0.ffn_norm.weight": torch.randn(8),
        "rope_factors_long.weight": torch.ones(4),
        "rope_factors_short.weight": torch.ones(4),
    }
    checkpoint = Checkpoint(folder(tmp_path, "phi3", tensors))
    expected = ("self_attn.qkv_proj", "mlp.gate_up_proj", "post_attention_layernorm")
    assert checkpoint.entries.keys() == {f"model.layers.0.{name}.weight" for name in expected}
    for name, tensor in zip(expected, tensors.values(), strict=False):
        assert torch.equal(checkpoint.read(f"model.layers.0.{name}.weight"), tensor)


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_gemma_norms_have_one_added(tmp_path: Path, architecture: str) -> None:
    tensors = {"output_norm.weight": torch.tensor([1.5, 2.0]), "blk.0.post_ffw_norm.weight": torch.tensor([1.0, 0.5])}
    checkpoint = Checkpoint(folder(tmp_path, architecture, tensors))
    assert checkpoint.read("model.norm.weight").tolist() == [0.5, 1.0]
    assert checkpoint.read("model.layers.0.post_feedforward_layernorm.weight").tolist() == [0.0, -0.5]


@pytest.mark.parametrize(
    ("stored", "error"), [("F16", 0.001), ("BF16", 0.005), ("Q8_0", 0.02), ("Q4_0", 0.3), ("Q4_1", 0.2)]
)
def test_quantized_matrices(tmp_path: Path, stored: str, error: float) -> None:
    weight = torch.from_numpy(np.random.default_rng(0).uniform(-2, 2, (8, 256)).astype(np.float32))
    checkpoint = Checkpoint(folder(tmp_path, "qwen2", {"blk.0.ffn_up.weight": weight}, stored))
    found = checkpoint.read("model.layers.0.mlp.up_proj.weight")
    assert found.dtype is torch.float32
    assert 0 < float((found - weight).abs().max()) < error


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"general\.architecture is 'mamba'; GGUF is read for gemma2, gemma3, llama, phi3"
    ):
        Checkpoint(folder(tmp_path, "mamba", {"token_embd.weight": torch.zeros(2, 2)}))
    with pytest.raises(ModelError, match=r"holds blk\.0\.ssm\.weight, which is no tensor of the architecture llama"):
        Checkpoint(folder(tmp_path, "llama", {"blk.0.ssm.weight": torch.zeros(2, 2)}))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"model\.gguf is not a GGUF file, or was not copied whole"):
        Checkpoint(ModelFolder(tmp_path))
