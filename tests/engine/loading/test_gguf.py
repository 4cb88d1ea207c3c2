"""GGUF to Hugging Face, on a tiny file written with the format's own package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.loading.formats import Checkpoint
from engine.loading.gguf import GGUFModel, _bfloat16
from engine.loading.store import ModelError, ModelFolder

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 64, 96, 4, 2, 8
HEAD_DIM = HIDDEN // HEADS
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "1", "Ġ"]


def weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (VOCAB, HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    return {f"{name}.weight": random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write(path: Path, *, architecture: str = "llama", pre: str = "smollm") -> dict[str, np.ndarray]:
    """The query weight is quantized (Q8_0), the others are float32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages }}")
    tensors = weights()
    for name, tensor in tensors.items():
        if name == "blk.0.attn_q.weight":
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


Converted = tuple[ModelFolder, dict[str, np.ndarray], list[tuple[str, int, int]]]


@pytest.fixture
def converted(tmp_path: Path) -> Converted:
    tensors = write(tmp_path / "x.gguf")
    (tmp_path / "out").mkdir()
    calls: list[tuple[str, int, int]] = []
    GGUFModel(tmp_path / "x.gguf").convert(tmp_path / "out", lambda *call: calls.append(call))
    return ModelFolder(tmp_path / "out"), tensors, calls


def test_weights_are_rounded_to_bfloat16_under_their_new_names(converted: Converted) -> None:
    folder, tensors, calls = converted
    checkpoint = Checkpoint(folder)
    assert len(checkpoint.entries) == len(tensors)
    for new, old in {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
        "model.layers.0.self_attn.o_proj": "blk.0.attn_output",
        "model.layers.0.input_layernorm": "blk.0.attn_norm",
        "model.layers.0.post_attention_layernorm": "blk.0.ffn_norm",
        "model.layers.0.mlp.gate_proj": "blk.0.ffn_gate",
        "model.layers.0.mlp.up_proj": "blk.0.ffn_up",
        "model.layers.0.mlp.down_proj": "blk.0.ffn_down",
    }.items():
        expected = torch.from_numpy(tensors[f"{old}.weight"]).bfloat16()
        assert torch.equal(checkpoint.read(f"{new}.weight"), expected), new
    total = checkpoint.num_bytes
    assert calls[-1] == ("converting the demo model", total, total)


def test_rows_of_query_and_key_leave_rope_order(converted: Converted) -> None:
    folder, tensors, _ = converted
    checkpoint = Checkpoint(folder)
    # Row i of a head's half was row 2 i, that of its other half row 2 i + 1.
    order = [head * HEAD_DIM + place for head in range(KV_HEADS) for place in (*range(0, 16, 2), *range(1, 16, 2))]
    key = torch.from_numpy(tensors["blk.0.attn_k.weight"])[order].bfloat16()
    assert torch.equal(checkpoint.read("model.layers.0.self_attn.k_proj.weight"), key)
    order = [head * HEAD_DIM + place for head in range(HEADS) for place in (*range(0, 16, 2), *range(1, 16, 2))]
    query = torch.from_numpy(tensors["blk.0.attn_q.weight"])[order]
    found = checkpoint.read("model.layers.0.self_attn.q_proj.weight").float()
    part = checkpoint.read("model.layers.0.self_attn.q_proj.weight", (range(3, 9), range(found.shape[1])))
    assert torch.equal(part, found[3:9])
    assert (found - query).abs().max() < 0.02  # half a step of Q8_0 and of bfloat16


def test_config(converted: Converted) -> None:
    config = converted[0].read_object("config.json")
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 128,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    }
    assert {name: config[name] for name in expected} == expected
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert converted[0].read_object("generation_config.json") == special


def test_tokenizer(converted: Converted) -> None:
    folder = converted[0]
    tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>ab 11<|im_end|>").ids == [1, 5, 7, 6, 6, 2]
    assert tokenizer.decode([5, 7, 6]) == "ab 1"
    config = folder.read_object("tokenizer_config.json")
    assert (config["eos_token"], config["chat_template"]) == ("<|im_end|>", "{{ messages }}")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"architecture": "qwen2"}, r"x\.gguf: general\.architecture is 'qwen2'; only 'llama'"),
        ({"pre": "llama-bpe"}, r"x\.gguf: tokenizer\.ggml\.pre is 'llama-bpe'; only 'smollm'"),
    ],
)
def test_refuses_what_it_does_not_know(tmp_path: Path, change: dict[str, str], text: str) -> None:
    write(tmp_path / "x.gguf", **change)
    with pytest.raises(ModelError, match=text):
        GGUFModel(tmp_path / "x.gguf")


def test_bfloat16_rounds_ties_to_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -1.00390625, 3e38, 1e-40, 0.0, -0.0], np.float32)
    values = np.concatenate((values, np.random.default_rng(1).normal(size=1000).astype(np.float32)))
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert (_bfloat16(values) == expected).all()
