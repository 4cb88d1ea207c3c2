"""Operators for decoder models: the public list.

Every operator gives a row of its result the same bits whatever the other rows of the call are, how
many there are, and how many threads work (`DESIGN.md`, "Bits"). Model code calls the names below
and never a device-specific form; `kernels.backend` decides what runs. Each operator's file holds
its launcher and a plain-torch reference, which is both the fallback and the oracle of the tests. Tensors
on a GPU go to the Triton kernels of `kernels.gpu`; names that end in `_ahead` exist there alone, for
a runner whose host does not wait to learn which tokens were sampled.

The import is cheap on purpose: torch is imported when a name is first used, because transformers
probes for a package of this name by importing it, also in processes that must stay free of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.activation import gelu_and_mul as gelu_and_mul
    from kernels.activation import silu_and_mul as silu_and_mul
    from kernels.activation import soft_cap_ as soft_cap_
    from kernels.attention import AttentionBatch as AttentionBatch
    from kernels.attention import HeadNorms as HeadNorms
    from kernels.attention import TileSchedule as TileSchedule
    from kernels.attention import paged_attention as paged_attention
    from kernels.attention import rotate_and_attend as rotate_and_attend
    from kernels.backend import NUMERICS as NUMERICS
    from kernels.backend import Implementation as Implementation
    from kernels.backend import num_threads as num_threads
    from kernels.backend import numerics_name as numerics_name
    from kernels.backend import set_num_threads as set_num_threads
    from kernels.backend import start as start
    from kernels.check import self_check as self_check
    from kernels.experts import PackedExperts as PackedExperts
    from kernels.experts import empty_experts as empty_experts
    from kernels.experts import mix_experts as mix_experts
    from kernels.gate import Activation as Activation
    from kernels.gpu.attention import attention_scratch_bytes as attention_scratch_bytes
    from kernels.gpu.compiling import compile_ahead as compile_ahead
    from kernels.gpu.embedding import embed_ahead as embed_ahead
    from kernels.gpu.logprobs import logprobs_ahead as logprobs_ahead
    from kernels.gpu.prefill import query_tile as query_tile
    from kernels.gpu.sampling import sample_ahead as sample_ahead
    from kernels.gpu.short import short_tiles as short_tiles
    from kernels.gpu.start import gpu_numerics_name as gpu_numerics_name
    from kernels.gpu.start import start_gpu as start_gpu
    from kernels.kv_cache import FP8 as FP8
    from kernels.kv_cache import UNSCALED as UNSCALED
    from kernels.kv_cache import KVScales as KVScales
    from kernels.kv_cache import empty_kv_cache as empty_kv_cache
    from kernels.kv_cache import kv_cache_shapes as kv_cache_shapes
    from kernels.kv_cache import write_kv as write_kv
    from kernels.matmul import PackedLinear as PackedLinear
    from kernels.matmul import add_linear as add_linear
    from kernels.matmul import gated_linear as gated_linear
    from kernels.matmul import linear as linear
    from kernels.matmul import normed_gated_linear as normed_gated_linear
    from kernels.matmul import normed_linear as normed_linear
    from kernels.matmul import pack_linear as pack_linear
    from kernels.norm import RowNorm as RowNorm
    from kernels.norm import head_norm_ as head_norm_
    from kernels.norm import rms_norm as rms_norm
    from kernels.program import NotRecordable as NotRecordable
    from kernels.program import Program as Program
    from kernels.program import record as record
    from kernels.rope import rope_ as rope_
    from kernels.routing import route as route
    from kernels.sampling import TokenLogprobs as TokenLogprobs
    from kernels.sampling import gumbel_noise as gumbel_noise
    from kernels.sampling import logprobs as logprobs
    from kernels.sampling import sample as sample
    from kernels.short_chunks import ShortTiles as ShortTiles
    from kernels.step_start import StepStart as StepStart

#: Public name to the module that defines it. No name equals a module's: importing a submodule
#: would bind the module over the operator.
_HOMES = {
    "Activation": "gate",
    "AttentionBatch": "attention",
    "FP8": "kv_cache",
    "HeadNorms": "attention",
    "Implementation": "backend",
    "KVScales": "kv_cache",
    "NUMERICS": "backend",
    "NotRecordable": "program",
    "PackedExperts": "experts",
    "PackedLinear": "matmul",
    "Program": "program",
    "RowNorm": "norm",
    "ShortTiles": "short_chunks",
    "StepStart": "step_start",
    "TileSchedule": "attention",
    "TokenLogprobs": "sampling",
    "UNSCALED": "kv_cache",
    "add_linear": "matmul",
    "attention_scratch_bytes": "gpu.attention",
    "compile_ahead": "gpu.compiling",
    "embed_ahead": "gpu.embedding",
    "empty_experts": "experts",
    "empty_kv_cache": "kv_cache",
    "gated_linear": "matmul",
    "gelu_and_mul": "activation",
    "gpu_numerics_name": "gpu.start",
    "gumbel_noise": "sampling",
    "head_norm_": "norm",
    "kv_cache_shapes": "kv_cache",
    "linear": "matmul",
    "logprobs": "sampling",
    "logprobs_ahead": "gpu.logprobs",
    "mix_experts": "experts",
    "normed_gated_linear": "matmul",
    "normed_linear": "matmul",
    "num_threads": "backend",
    "numerics_name": "backend",
    "pack_linear": "matmul",
    "paged_attention": "attention",
    "query_tile": "gpu.prefill",
    "record": "program",
    "rms_norm": "norm",
    "rope_": "rope",
    "rotate_and_attend": "attention",
    "route": "routing",
    "sample": "sampling",
    "sample_ahead": "gpu.sampling",
    "self_check": "check",
    "set_num_threads": "backend",
    "short_tiles": "gpu.short",
    "silu_and_mul": "activation",
    "soft_cap_": "activation",
    "start": "backend",
    "start_gpu": "gpu.start",
    "write_kv": "kv_cache",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kernels' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"kernels.{home}"), name)
    globals()[name] = value  # later look-ups do not come here
    return value


def __dir__() -> list[str]:
    return __all__
