"""Tiny random Llamas, and what transformers makes of them: the oracle of the device tests.

Run as a program, in a process of its own, it writes a folder of models and `golden.json`:
transformers must not share a process with this project's `kernels` package, whose name it probes for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

VOCAB_SIZE = 120
CONTEXT_LENGTH = 640
EOS_ID = 2
NUM_NEW = 24

#: What all tiny models have, in transformers' names.
SETTINGS: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    # Large weights keep the most likely token well apart from the next.
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
}

#: Beyond what all have: what is special about each.
VARIANTS: dict[str, dict[str, object]] = {
    "llama_tied": {"tie_word_embeddings": True},
    "llama_untied": {"tie_word_embeddings": False},
    "llama_bias": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "llama_head_dim": {"tie_word_embeddings": True, "hidden_size": 48, "head_dim": 20, "rope_theta": 500000.0},
}

#: Lengths on both sides of a block, of a key tile (64) and of a split (256).
PROMPT_LENGTHS = (1, 3, 15, 16, 17, 40, 63, 65, 130, 257, 300, 5, 7, 33, 31, 2)


def character(token_id: int) -> str:
    """The one character a token stands for: printable ASCII first, then Latin letters."""
    return chr(0x20 + token_id) if token_id < 95 else chr(0x100 + token_id)


def prompt(number: int) -> list[int]:
    """A prompt of PROMPT_LENGTHS[number] tokens, the same in every process."""
    return [3 + (7 * number + 13 * place + place * place) % (VOCAB_SIZE - 3) for place in range(PROMPT_LENGTHS[number])]


def make_tiny_models(folder: Path) -> None:
    """Fill `folder` with a model folder for each variant, and golden.json."""
    subprocess.run([sys.executable, "-W", "ignore", __file__, str(folder)], check=True, cwd=folder)


def _main(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    golden: dict[str, dict[str, object]] = {}
    for seed, (name, special) in enumerate(VARIANTS.items()):
        torch.manual_seed(seed)
        rope_theta = special.get("rope_theta", 10000.0)
        config = LlamaConfig(
            **SETTINGS | {k: v for k, v in special.items() if k != "rope_theta"},
            rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        )
        model = LlamaForCausalLM(config).float().eval()
        randomize(model)
        model.save_pretrained(folder / name)
        if name == "llama_untied":
            model.save_pretrained(folder / "llama_sharded", max_shard_size="100KB")
            write_tokenizer(folder / "llama_sharded")
        write_tokenizer(folder / name)
        golden[name] = _golden(model)
    (folder / "golden.json").write_text(json.dumps(golden))


def randomize(model: object) -> None:
    """Give biases and norms values that would be missed: transformers makes them 0 and 1."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():  # type: ignore[attr-defined]
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def _golden(model: object) -> dict[str, object]:
    """Greedy ids and the logprobs of the prompt's own tokens for each prompt, and the logprobs of all
    tokens after the first four prompts.
    """
    import torch

    prompts = [prompt(number) for number in range(len(PROMPT_LENGTHS))]
    logprobs, prompt_logprobs = [], []
    with torch.no_grad():
        for number, ids in enumerate(prompts):
            tokens = torch.tensor([ids])
            every = model(tokens).logits[0].log_softmax(-1)  # type: ignore[operator]
            prompt_logprobs.append(every[:-1].gather(1, tokens[0, 1:, None]).flatten().tolist())
            if number < 4:
                logprobs.append(every[-1].tolist())
    return {"ids": greedy_ids(model, prompts, NUM_NEW), "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}


def greedy_ids(model: object, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """The `num_new` ids that continue each prompt. One batch, padded on the left: a tenth of the time."""
    import torch

    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    out = model.generate(  # type: ignore[attr-defined]
        tokens, attention_mask=mask, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False
    )
    return out[:, width:].tolist()  # type: ignore[no-any-return]


def write_tokenizer(folder: Path) -> None:
    """Every token is one character; `<s>`, `</s>` and padding are special."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    special = {0: "<pad>", 1: "<s>", EOS_ID: "</s>"}
    vocab = {special.get(token_id, character(token_id)): token_id for token_id in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
