"""A worst-case step of a model, measured: the KV pool gets the memory that it leaves free, and its speed says how
many prompt tokens a step may have beside requests that decode.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import kernels
from engine.device.graphs import chunk_layouts, decode_layouts
from engine.device.kv import KVLayout
from engine.layers.attention import ForwardBatch, LayerCache
from engine.loading.store import ModelError
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec

#: For what neither the measured step nor `graphs` shows: what the driver keeps of a graph, the allocator's fragments,
#: penalties' state.
_RESERVE = 2**30

#: A step with others' prompts takes a stream about so long.
_PREFILL_S = 0.020

#: Tokens to which that is rounded, two tiles of a product, and the least. Of an 8B model on an H200 640, 768, 896 and
#: 1024 take 15.2, 18.0, 22.1 and 23.9 ms.
_TOKENS_UNIT, _LEAST_TOKENS = 256, 128

#: Of the worst step's rate, what a step of 20 ms reaches: it has contexts, and comes while the device is hot. An 8B
#: model's 16,384 tokens took 0.313 to 0.370 s on H200s, which alone would make it 768 tokens on some, 1024 on others;
#: with this it is 768 from 0.293 to 0.409 s.
_SHORT_STEPS_RATE = 0.8


@dataclass(frozen=True, slots=True)
class WorstStep:
    """A step of `num_tokens` prompt tokens in which as many rows as may be are sampled."""

    num_tokens: int
    peak_bytes: int  # weights included
    seconds: float

    @property
    def prefill_tokens(self) -> int:
        """Tokens computed in about 20 ms, where a step has as many."""
        units = _SHORT_STEPS_RATE * self.num_tokens * _PREFILL_S / self.seconds / _TOKENS_UNIT
        fitting = round(units) * _TOKENS_UNIT if units >= 1 else _LEAST_TOKENS
        return min(fitting, self.num_tokens)


def kv_memory_bytes(
    step: WorstStep,
    spec: ModelSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_num_seqs: int,
    context_length: int,
    utilization: float,
) -> int:
    """Bytes for the pool within `utilization` of the device's memory. `dtype` is that of activations. Raises ModelError
    when nothing is left."""
    _, total = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_allocated(device)
    peak, max_num_tokens = step.peak_bytes, step.num_tokens
    heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype)
    short_tile, long_tile = kernels.short_tiles(*heads).tokens, kernels.query_tile(*heads)
    layouts = [*decode_layouts(max_num_seqs), *chunk_layouts(max_num_seqs, max_num_tokens, short_tile, long_tile)]
    # Graphs share memory. Of float32 logits twice that of the most rows, since what fewer have taken before is no part
    # of it; of the rest that of the most tokens.
    graphs = 2 * max(layout.num_sampled for layout in layouts) * spec.vocab_size * 4
    graphs += (peak - weights) * max(layout.num_tokens for layout in layouts) // max_num_tokens
    # Graphs have attention's memory, and steps without one have it again.
    graphs += 2 * kernels.attention_scratch_bytes(
        spec.num_heads, spec.num_kv_heads, spec.head_dim, max_num_seqs, context_length, device
    )
    other = total - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device)
    left = int(total * utilization) - peak - graphs - other - _RESERVE
    if left <= 0:
        raise ModelError(
            f"{torch.cuda.get_device_name(device)} has {_gib(total)}; --gpu-memory-utilization {utilization} of it is "
            f"{_gib(int(total * utilization))}. Weights take {_gib(weights)}, a step of --max-num-batched-tokens "
            f"{max_num_tokens} {_gib(peak - weights)} more, graphs {_gib(graphs)}, other programs {_gib(other)}: "
            f"nothing is left for KV. Raise the utilization, or lower --max-num-batched-tokens or --max-num-seqs."
        )
    return left


@torch.inference_mode()
def measure_worst_step(
    model: Decoder,
    spec: ModelSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    block_size: int,
    max_num_seqs: int,
    max_num_tokens: int,
) -> WorstStep:
    """Runs it twice: libraries warm up in the first. `dtype` is that of activations."""
    caches = KVLayout(1, block_size, spec.num_layers, spec.num_kv_heads, spec.head_dim, kv_dtype).allocate(device)
    tile = kernels.query_tile(spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype)
    starts = torch.arange(0, max_num_tokens, tile, dtype=torch.int32)
    tiles = torch.stack((starts, torch.full_like(starts, tile).minimum(max_num_tokens - starts)), dim=1)
    zeros = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
    table = torch.zeros(1, tile, dtype=torch.int32, device=device)  # a tile reads as many positions as it has rows
    schedule = kernels.TileSchedule(0, tiles.to(device), zeros[:0], 1, zeros.clone())
    attention = kernels.AttentionBatch(table, zeros, zeros, schedule)
    sampled = torch.arange(min(max_num_seqs, max_num_tokens), dtype=torch.int32, device=device)
    start = kernels.StepStart(last_ids=zeros, cells=table.view(-1), num_changes=zeros[:1], changes=zeros)
    step = partial(_logits, model, ForwardBatch(zeros, None, attention, sampled, start), caches)
    kernels.compile_ahead(step)
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        logits = step()
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begun
        changed = logits.clone()  # what penalties work on
        peak = torch.cuda.max_memory_allocated(device)
        del logits, changed
    del caches, step
    gc.collect()
    torch.cuda.empty_cache()
    return WorstStep(max_num_tokens, peak, seconds)


def _logits(model: Decoder, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
    return model.logits(model.hidden(batch, caches))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
