"""generation_config.json: the ids that end a sequence, and sampling defaults of the model."""

from __future__ import annotations

from engine.loading.store import ModelError, ModelFolder
from protocol.sampling import SamplingError, SamplingParams, from_mapping

_FILE = "generation_config.json"

#: Taken over whatever `do_sample` says, as vLLM does; a request's own value wins.
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_generation_config(folder: ModelFolder) -> dict[str, object]:
    """The file's content; empty without one."""
    return folder.read_object(_FILE) if folder.has(_FILE) else {}


def generation_defaults(generation: dict[str, object]) -> dict[str, object]:
    """Sampling fields for requests that do not give them. Raises ModelError for one out of range."""
    given = from_mapping({name: generation[name] for name in _DEFAULTS if generation.get(name) is not None})
    try:
        SamplingParams(**given).validate()  # type: ignore[arg-type]  # validate() checks the types
    except SamplingError as error:
        raise ModelError(f"{_FILE}: {error}") from error
    return given


def eos_ids(generation: dict[str, object], config: dict[str, object], vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids: an integer or a list, of generation_config.json, else of config.json.

    Qwen's first generation names `<|endoftext|>` alone and has the ends of its chat, `<|im_start|>` and `<|im_end|>`,
    in its code; they are the next two ids.
    """
    for name, source in ((_FILE, generation), ("config.json", config)):
        value = source.get("eos_token_id")
        if value is None:
            continue
        ids: list[int] = []
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise ModelError(
                    f"{name}: eos_token_id {value!r} is not a token id below {vocab_size}, or a list of them."
                )
            ids.append(token_id)
        if ids and generation.get("chat_format") == "chatml":
            ids = [*ids, *(after for after in (ids[-1] + 1, ids[-1] + 2) if after < vocab_size)]
        return tuple(dict.fromkeys(ids))
    return ()
