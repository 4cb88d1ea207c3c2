"""How much of a GPU's memory the KV pool gets: what a measured worst-case step leaves free."""

from __future__ import annotations

import gc

import torch

import kernels
from engine.device.kv import KVLayout
from engine.layers.attention import ForwardBatch
from engine.loading.store import ModelError
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec

#: For what no measured step shows: graphs' own memory, the allocator's fragments, penalties' state.
_RESERVE = 2**30


def kv_memory_bytes(
    model: Decoder,
    spec: ModelSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    max_num_seqs: int,
    max_num_tokens: int,
    utilization: float,
) -> int:
    """Bytes for the pool within `utilization` of the device's memory. Raises ModelError when nothing is left."""
    _, total = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_allocated(device)
    peak = _peak_bytes(model, spec, device, dtype, block_size, max_num_seqs, max_num_tokens)
    # Every graph keeps its logits: the ladder's rows sum to less than four times its last.
    graphs = 4 * max_num_seqs * spec.vocab_size * 4
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
def _peak_bytes(
    model: Decoder,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    max_num_seqs: int,
    max_num_tokens: int,
) -> int:
    """Most bytes allocated while `max_num_tokens` are computed and as many rows as may be are sampled."""
    caches = KVLayout(1, block_size, spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype).allocate(device)
    tile = kernels.query_tile(spec.num_heads, spec.num_kv_heads, spec.head_dim, dtype)
    starts = torch.arange(0, max_num_tokens, tile, dtype=torch.int32)
    tiles = torch.stack((starts, torch.full_like(starts, tile).minimum(max_num_tokens - starts)), dim=1)
    zeros = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
    table = torch.zeros(1, tile, dtype=torch.int32, device=device)  # a tile reads as many positions as it has rows
    attention = kernels.AttentionBatch(table, zeros, zeros, kernels.TileSchedule(0, tiles.to(device), 1, zeros))
    sampled = torch.arange(min(max_num_seqs, max_num_tokens), dtype=torch.int32, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    logits = model.logits(model.hidden(ForwardBatch(zeros, None, attention, sampled, zeros), caches))
    _ = logits.clone()  # what penalties work on
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del caches, logits, _
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
