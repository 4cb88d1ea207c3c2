"""A causal LM built by transformers from a model folder, and one way of calling whichever it is.

Weights are read from safetensors alone, and code that a folder brings is never run.
"""

from __future__ import annotations

import inspect
import platform
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.config import EngineConfig
from engine.loading.store import ModelError, ModelFolder
from protocol.messages import U32

#: Positions of a prompt in one forward pass. Part of the numerics.
SEGMENT = 256

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

#: What versions and families call the cache among the arguments of `forward`.
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")


@dataclass(frozen=True, slots=True)
class TransformersModel:
    """A loaded model, and how it is called."""

    model: PreTrainedModel
    device: torch.device
    cache_name: str
    keeps_logits: bool
    segment: int

    @classmethod
    def load(cls, folder: ModelFolder, config: EngineConfig, device: torch.device, *, dummy: bool) -> TransformersModel:
        """Raises ModelError where transformers cannot build it."""
        transformers.utils.logging.disable_progress_bar()  # progress is told to the supervisor
        values = folder.read_object("config.json")
        settings = _model_config(values)
        dtype = _dtype(config.dtype, settings, device)
        try:
            model = _dummy(settings, dtype) if dummy else _pretrained(folder, settings, dtype)
        except ModelError:
            raise
        except Exception as error:  # whatever the code of some hundred families raises
            raise ModelError(f"transformers cannot load {folder.path}: {type(error).__name__}: {error}") from error
        if type(model).__name__ not in (names := values.get("architectures") or []):
            raise ModelError(
                f"config.json: architectures is {names!r}; as a causal LM transformers makes a "
                f"{type(model).__name__} of it, which is another model."
            )
        model = model.to(device).eval().requires_grad_(False)
        parameters = inspect.signature(model.forward).parameters
        cache_name = next((name for name in _CACHE_NAMES if name in parameters), None)
        if cache_name is None:
            raise ModelError(f"{type(model).__name__} takes no cache, so it cannot be served.")
        # A recurrent state is made from a whole prompt at once.
        segment = 2**31 if getattr(model, "_is_stateful", False) else SEGMENT
        return cls(model, device, cache_name, "logits_to_keep" in parameters, segment)

    def new_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def forward(self, ids: array[int], cache: DynamicCache, *, all_logits: bool = False) -> Tensor:
        """Run the tokens `ids` on top of `cache`, which grows by them.

        Returns the logits after each, or after the last alone: float32 [positions, vocab_size] on the CPU.
        """
        arguments: dict[str, object] = {self.cache_name: cache, "use_cache": True}
        if self.keeps_logits:
            arguments["logits_to_keep"] = 0 if all_logits else 1  # 0 is all
        # No mask: nothing is padded, and recurrent models take one as long as their input only.
        out = self.model(
            input_ids=torch.tensor([ids.tolist()], device=self.device),
            **arguments,
        )
        return out.logits[0, slice(None) if all_logits else slice(-1, None)].float().cpu()

    @torch.inference_mode()
    def measure(self) -> tuple[int, int]:
        """(vocab_size, bytes by which the cache grows with a position), from a first forward pass.

        Raises ModelError when there can be none.
        """
        cache, ids = self.new_cache(), array(U32, [0, 0])
        try:
            logits = self.forward(ids, cache)
        except Exception as error:  # as in `load`
            raise ModelError(f"{type(self.model).__name__} does not run: {type(error).__name__}: {error}") from error
        grown = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
        num_bytes = sum(part.numel() * part.element_size() for part in grown if isinstance(part, Tensor))
        return logits.shape[-1], num_bytes // len(ids)

    def context_length(self, asked: int | None) -> int:
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if not isinstance(most, int):
            if asked is None:
                raise ModelError("config.json has no max_position_embeddings; give --max-model-len.")
            return asked
        if asked is not None and asked > most:
            raise ModelError(f"--max-model-len {asked} is more than the model's max_position_embeddings, {most}.")
        return asked or most

    def facts(self) -> dict[str, str | int | bool]:
        """What decides the bits of a result, beside the model."""
        on_cpu = self.device.type == "cpu"
        name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        return {
            "backend": "transformers",
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "dtype": str(self.model.dtype),
            "attention": str(getattr(self.model.config, "_attn_implementation", "")),
            "segment": self.segment,
            "device": f"cpu {name}" if on_cpu else f"cuda {torch.cuda.get_device_name(self.device)}",
            # torch cuts a product's sums by its number of threads.
            "threads": torch.get_num_threads() if on_cpu else 0,
        }


def _model_config(values: Mapping[str, object]) -> PreTrainedConfig:
    """config.json as transformers' class for its `model_type`. Code that a folder brings is never run."""
    kind = values.get("model_type")
    if kind not in CONFIG_MAPPING:
        remedy = "Update transformers, or serve a model whose code it has."
        if "auto_map" in values:
            remedy = "Its own code, named in auto_map, is never run."
        raise ModelError(
            f"config.json: architectures is {values.get('architectures')!r}, and transformers "
            f"{transformers.__version__} has no model_type {kind!r}. {remedy}"
        )
    try:
        return CONFIG_MAPPING[kind].from_dict({name: value for name, value in values.items() if name != "auto_map"})
    except Exception as error:  # checks of its own, of many kinds
        raise ModelError(f"config.json: transformers refuses it: {type(error).__name__}: {error}") from error


def _dtype(asked: str, settings: PreTrainedConfig, device: torch.device) -> torch.dtype:
    stored = settings.dtype if asked == "auto" else _DTYPES[asked]
    if not isinstance(stored, torch.dtype):
        stored = torch.float32
    # A CPU computes float16 in float32, as our own backend has it.
    return torch.float32 if stored is torch.float16 and device.type == "cpu" else stored


def _dummy(settings: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(settings, dtype=dtype)


def _pretrained(folder: ModelFolder, settings: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Raises ModelError when weights are missing, which transformers would make up."""
    model, loaded = AutoModelForCausalLM.from_pretrained(
        folder.path, config=settings, dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
    )
    if missing := sorted(loaded["missing_keys"]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"the weights of {folder.path} hold no {missing[0]}{more}, which config.json calls for.")
    return model
