"""The tokenizer files of a model folder, as the bundle that gateways fetch."""

from __future__ import annotations

from engine.loading.store import ModelError, ModelFolder
from protocol import bundle


def tokenizer_bundle(folder: ModelFolder) -> bytes:
    """Packed bundle of the tokenizer files there are. Raises ModelError without a tokenizer.json.

    The chat template may be in tokenizer_config.json or in chat_template.jinja; both are in the
    bundle and the gateway, which renders it, decides.
    """
    if not folder.has("tokenizer.json"):
        raise ModelError(f"{folder.path} has no tokenizer.json; only fast tokenizers are supported.")
    files = {name: folder.read_text(name) for name in bundle.NAMES if folder.has(name)}
    try:
        return bundle.pack(files)
    except bundle.BundleError as error:
        raise ModelError(f"{folder.path}: {error}") from error
