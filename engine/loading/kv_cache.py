"""Which type the KV pool has. Knows nothing of torch."""

from __future__ import annotations

from engine.loading.quantization import Quantization
from engine.loading.store import ModelError

FP8 = "fp8"

_NAMES_OF_FP8 = (FP8, "fp8_e4m3")

#: What `kv_cache_scheme` of a checkpoint made for FP8 says, AutoFP8's in a word; other keys have no meaning here.
_AUTOFP8_SCHEME = "static"
_SCHEME: dict[str, object] = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def kv_cache_dtype(
    asked: str, quantization: Quantization | None, *, active: str, on_cpu: bool, lacks_fp8: str | None = None
) -> str:
    """The pool's dtype ("float32", "bfloat16", "float16", "fp8") for --kv-cache-dtype `asked`.

    `active` is the dtype of activations, `lacks_fp8` why a GPU can have no FP8. "auto" is `active`, but FP8 where the
    checkpoint was made for it and the device has it. Raises ModelError for what there is not.
    """
    made_for_fp8 = quantization is not None and quantization.values.get("kv_cache_scheme") is not None
    if asked == "auto":
        asked = FP8 if made_for_fp8 and lacks_fp8 is None else active
    elif asked in _NAMES_OF_FP8:
        asked = FP8
    if not on_cpu and asked not in (active, FP8):
        raise ModelError(
            f"--kv-cache-dtype {asked}: a GPU's pool has the type of activations, {active}, or fp8. Leave it out, or "
            f"use --device cpu."
        )
    if asked == FP8 and lacks_fp8 is not None:
        raise ModelError(f"--kv-cache-dtype {asked}: {lacks_fp8} Leave it out, or use --device cpu.")
    if asked == FP8 and made_for_fp8:
        assert quantization is not None
        if quantization.values["kv_cache_scheme"] != _AUTOFP8_SCHEME:
            _check_scheme(quantization.inner("kv_cache_scheme"))
    return asked


def _check_scheme(scheme: Quantization) -> None:
    for name, expected in _SCHEME.items():
        if scheme.values.get(name, expected) != expected:
            raise scheme.error(name, f"must be {expected!r}; --kv-cache-dtype bfloat16 does without its scales")
