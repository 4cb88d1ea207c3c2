"""Tiny random models of every family and kind of rope, and what transformers makes of them.

Run as a program, in a process of its own as `tiny_models` is, it writes model folders and `golden.json`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

CONTEXT_LENGTH = 640
NUM_NEW = 16
WINDOW = 16

#: Context lengths on both sides of what tiny models are trained for, by whichever field says so.
ROPE_LENGTHS = (64, 65, 640, 641, 1280)

#: On both sides of the window, over two blocks, and of a split of attention (256).
PROMPT_LENGTHS = (15, 16, 17, 33, 200, 300)


@dataclass(frozen=True)
class Variant:
    """`family` is the prefix of transformers' classes, or "Qwen" for our own reference; `fields` are set in its config.
    `prompts` are numbers of PROMPT_LENGTHS, those for which the oracle's result is a function of the ids;
    `max_model_len` is what the engine is to be asked for, None for nothing.
    """

    family: str
    fields: dict[str, object]
    prompts: tuple[int, ...] = tuple(range(len(PROMPT_LENGTHS)))
    max_model_len: int | None = None
    rope: dict[str, object] = field(default_factory=dict)


def _rope(kind: str, **parameters: object) -> Variant:
    return Variant("Llama", {}, rope={"rope_type": kind, "rope_theta": 10000.0} | parameters)


_LONG = {
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.8, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0, 10.0, 12.0],
    "original_max_position_embeddings": 64,
}

#: Qwen's first generation has names of its own. Beyond 160 tokens its base and queries grow; up to 320 the base is one.
QWEN: dict[str, object] = {
    "kv_channels": 16,
    "intermediate_size": 224,
    "layer_norm_epsilon": 1e-5,
    "rotary_emb_base": 10000,
    "seq_length": 160,
    "no_bias": True,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
}

#: Of the 16 dimensions of a head Phi-3 turns 12 here.
_LONG_PHI3 = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75} | {
    name: value[:6] if isinstance(value, list) else value for name, value in _LONG.items()
}

QWEN3_MOE: dict[str, object] = {"num_experts": 10, "num_experts_per_tok": 4, "moe_intermediate_size": 24}

VARIANTS: dict[str, Variant] = {
    "qwen2_tied": Variant("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": Variant("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": Variant("Qwen3", {"hidden_size": 48, "head_dim": 20, "tie_word_embeddings": True}),
    "qwen3_bias": Variant("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "mistral": Variant("Mistral", {"hidden_size": 48, "head_dim": 20, "sliding_window": None}),
    "mistral_window": Variant("Mistral", {"sliding_window": WINDOW}),
    "qwen": Variant("Qwen", QWEN | {"seq_length": CONTEXT_LENGTH}),
    "qwen_short": Variant("Qwen", QWEN, (0, 1, 2, 3)),
    "qwen_long": Variant("Qwen", QWEN, (4, 5), 320),
    "qwen_biases": Variant(
        "Qwen", QWEN | {"no_bias": False, "use_dynamic_ntk": False, "use_logn_attn": False}, max_model_len=640
    ),
    "phi3_window": Variant("Phi3", {"sliding_window": WINDOW}),
    "phi3_longrope_short": Variant(
        "Phi3", {"original_max_position_embeddings": 64, "tie_word_embeddings": True}, (0, 1, 2, 3), 64, _LONG_PHI3
    ),
    "phi3_longrope_long": Variant("Phi3", {"original_max_position_embeddings": 64}, (4, 5), None, _LONG_PHI3),
    "gemma2": Variant(
        "Gemma2",
        {
            "hidden_size": 48,
            "head_dim": 32,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "mixtral": Variant("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 3, "rms_norm_eps": 1e-5}),
    "mixtral_window": Variant("Mixtral", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen3_moe": Variant("Qwen3Moe", QWEN3_MOE | {"head_dim": 20, "norm_topk_prob": True}),
    "qwen3_moe_sparse": Variant(
        "Qwen3Moe",
        QWEN3_MOE
        | {"decoder_sparse_step": 2, "num_hidden_layers": 5, "mlp_only_layers": [3], "attention_bias": True}
        | {"use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "gemma3": Variant(
        "Gemma3",
        {
            "hidden_size": 48,
            "head_dim": 20,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "llama_linear": _rope("linear", factor=4.0),
    "llama_dynamic": _rope("dynamic", factor=2.0),
    "llama_llama3": _rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "llama_yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=160),
    "llama_yarn_mscale": _rope(
        "yarn",
        factor=4.0,
        original_max_position_embeddings=160,
        mscale=0.8,
        mscale_all_dim=0.3,
        beta_fast=16,
        beta_slow=2,
        truncate=False,
    ),
    # transformers takes the short factors up to the trained context and the long ones beyond, by the length so far.
    "llama_longrope_short": Variant(
        "Llama", {}, (0, 1, 2, 3), 64, {"rope_type": "longrope", "rope_theta": 1e4} | _LONG
    ),
    "llama_longrope_long": Variant("Llama", {}, (4, 5), None, {"rope_type": "longrope", "rope_theta": 1e4} | _LONG),
}


#: Variants that are also stored as transformers 5 holds them, as `NAME_stacked`.
STACKED = ("mixtral", "qwen3_moe_sparse")


def prompt(number: int) -> list[int]:
    """A prompt of PROMPT_LENGTHS[number] tokens of 120, the same in every process."""
    return [3 + (11 * number + 17 * place + place * place) % 117 for place in range(PROMPT_LENGTHS[number])]


def make_family_models(folder: Path) -> None:
    """Fill `folder` with a model folder for each variant, and golden.json."""
    subprocess.run([sys.executable, "-W", "ignore", __file__, str(folder)], check=True, cwd=folder)


def _main(folder: Path) -> None:
    import torch
    import transformers
    from qwen_reference import QwenReference
    from tiny_models import SETTINGS, randomize, write_tokenizer

    torch.set_num_threads(1)
    golden = {}
    for seed, (name, variant) in enumerate(VARIANTS.items()):
        torch.manual_seed(seed)
        settings = SETTINGS | {"rope_parameters": variant.rope or None} | variant.fields
        if variant.family == "Qwen":
            reference = QwenReference(settings)
            reference.save_pretrained(folder / name)
            write_tokenizer(folder / name)
            golden[name] = _golden(reference, [prompt(number) for number in variant.prompts])
            continue
        suffix = "Text" if variant.family == "Gemma3" else ""
        config = getattr(transformers, f"{variant.family}{suffix}Config")(**settings)
        model = getattr(transformers, f"{variant.family}ForCausalLM")(config).float().eval()
        if variant.family == "Gemma2":  # other implementations of attention leave the cap of scores out, by version
            model.set_attn_implementation("eager")
        randomize(model)
        for parameter_name, parameter in model.named_parameters():
            if variant.family.startswith("Gemma") and "post_" in parameter_name:
                parameter.data += 5  # else the scaled embedding outweighs what layers add to it
        model.save_pretrained(folder / name)
        write_tokenizer(folder / name)
        if name in STACKED:
            model.save_pretrained(folder / f"{name}_stacked", save_original_format=False)
            write_tokenizer(folder / f"{name}_stacked")
        golden[name] = _golden(model, [prompt(number) for number in variant.prompts])
        if variant.rope:
            golden[name]["rope"] = _rope_golden(config)
    (folder / "golden.json").write_text(json.dumps(golden))


def _golden(model: object, prompts: list[list[int]]) -> dict[str, list[list[float]]]:
    """For each prompt the ids that continue it, and the logprobs of all tokens after it."""
    import torch
    from qwen_reference import QwenReference
    from tiny_models import EOS_ID, greedy_ids

    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0, -1] for ids in prompts]  # type: ignore[operator]
        if isinstance(model, QwenReference):
            ids = [model.greedy_ids(each, NUM_NEW, EOS_ID) for each in prompts]
        else:
            ids = greedy_ids(model, prompts, NUM_NEW)
    return {"ids": ids, "logprobs": [each.log_softmax(-1).tolist() for each in logits]}


def _rope_golden(config: object) -> list[list[float]]:
    """For each of ROPE_LENGTHS, what cosines and sines are multiplied by, then the radians a position."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found = []
    for length in ROPE_LENGTHS:
        frequencies, magnitude = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, seq_len=length)  # type: ignore[attr-defined]
        found.append([magnitude, *frequencies.tolist()])
    return found


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
