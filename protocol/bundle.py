"""The tokenizer bundle: the text files a gateway needs, packed as one blob named by its sha256.

A blob is an orjson object {file name: text} with sorted keys, so equal files give equal bytes.
"""

from __future__ import annotations

import hashlib

import orjson

#: The only names that may be in a bundle, so that unpacking never writes anywhere else.
NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
MAX_BYTES = 64 * 2**20


class BundleError(ValueError):
    """The blob is not a bundle, or names a file that does not belong in one."""


def pack(files: dict[str, str]) -> bytes:
    """Blob of `files` (name to text). Raises BundleError for a name or size that may not be."""
    blob = orjson.dumps(_checked(files), option=orjson.OPT_SORT_KEYS)
    if len(blob) > MAX_BYTES:
        raise BundleError(f"tokenizer files take {len(blob)} bytes; a bundle holds at most {MAX_BYTES}.")
    return blob


def unpack(blob: bytes) -> dict[str, str]:
    """Files of a blob. Raises BundleError when it is not one."""
    try:
        files = orjson.loads(blob)
    except orjson.JSONDecodeError as error:
        raise BundleError(f"not a tokenizer bundle: {error}") from error
    return _checked(files)


def sha256(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


def _checked(files: object) -> dict[str, str]:
    if not isinstance(files, dict):
        raise BundleError("a tokenizer bundle is an object of file name to text.")
    for name, text in files.items():
        if name not in NAMES:
            raise BundleError(f"{name!r} does not belong in a tokenizer bundle; it holds {', '.join(NAMES)}.")
        if not isinstance(text, str):
            raise BundleError(f"{name} in a tokenizer bundle must be text.")
    return files
