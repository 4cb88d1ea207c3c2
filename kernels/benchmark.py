"""Times of the operators on this machine, as a table: `python -m kernels.benchmark [threads]`.

Shapes are SmolLM2-135M's: hidden 576, 9 query and 3 KV heads of 64, feed-forward 1536, vocabulary
49152. A time is the least of several calls; bfloat16 weights and cache unless said.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import kernels

_Row = tuple[str, float, float]  # what, ms of ours, ms of torch

_LINEARS = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
_ROW_COUNTS = (1, 4, 8, 32, 256)


def _least_ms(call: Callable[[], object], budget_s: float = 0.4) -> float:
    call()
    best, end = float("inf"), time.perf_counter() + budget_s
    for _ in range(200):
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            break
    return best * 1e3


def _linears() -> Iterator[_Row]:
    for num_out, num_in in _LINEARS:
        weight = torch.randn(num_out, num_in)
        packed = kernels.pack_linear(weight.bfloat16())
        for rows in _ROW_COUNTS:
            x = torch.randn(rows, num_in)
            narrow = x.bfloat16()
            ours = _least_ms(partial(kernels.linear, narrow, packed))
            theirs = _least_ms(partial(torch.nn.functional.linear, x, weight))
            yield f"linear {num_out}x{num_in}, {rows} rows (torch: float32)", ours, theirs


def _experts() -> Iterator[_Row]:
    """64 experts of 384 on a hidden size of 1024, 8 a row."""
    count, hidden, inner, top_k = 64, 1024, 384, 8
    gate_up, down = torch.randn(count, 2 * inner, hidden) / 32, torch.randn(count, hidden, inner) / 20
    packed = kernels.empty_experts(count, hidden, inner, dtype=torch.bfloat16, device=torch.device("cpu"))
    for expert in range(count):
        gate, up = gate_up[expert].bfloat16().chunk(2)
        packed.fill(expert, gate, up, down[expert].bfloat16())
    for rows in _ROW_COUNTS:
        x, logits = torch.randn(rows, hidden), torch.randn(rows, count)
        chosen, weights = kernels.route(logits, top_k, renormalize=True)
        ours = _least_ms(partial(kernels.mix_experts, x.bfloat16(), chosen, weights, packed))
        theirs = _least_ms(partial(_one_expert_after_another, x, chosen, weights, gate_up, down))
        yield f"{top_k} of {count} experts {inner}x{hidden}, {rows} rows (torch: float32)", ours, theirs
        yield (
            f"route to {top_k} of {count} experts, {rows} rows",
            _least_ms(partial(kernels.route, logits, top_k, renormalize=True)),
            _least_ms(partial(_softmax_topk, logits, top_k)),
        )


def _one_expert_after_another(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        gated = _silu_mul(torch.nn.functional.linear(x[rows], gate_up[expert]))
        total.index_add_(0, rows, torch.nn.functional.linear(gated, down[expert]) * weights[rows, places, None])
    return total


def _softmax_topk(logits: Tensor, top_k: int) -> object:
    return logits.softmax(1).topk(top_k)


def _attentions() -> Iterator[_Row]:
    for what, num_seqs, context, chunk in (
        ("decode", 1, 512, 1),
        ("decode", 1, 4096, 1),
        ("decode", 8, 512, 1),
        ("decode", 32, 512, 1),
        ("prefill", 1, 256, 256),
        ("prefill", 1, 2048, 256),
    ):
        k_shape, v_shape = kernels.kv_cache_shapes(num_seqs * context // 16, 16, 3, 64)
        k, v = torch.randn(k_shape).bfloat16(), torch.randn(v_shape).bfloat16()
        tables = torch.randperm(k_shape[0]).to(torch.int32).view(num_seqs, -1)
        positions = torch.arange(context - chunk, context, dtype=torch.int32).repeat(num_seqs)
        index = torch.arange(num_seqs, dtype=torch.int32).repeat_interleave(chunk)
        batch = kernels.AttentionBatch(tables, index, positions)
        q = torch.randn(num_seqs * chunk, 9, 64).bfloat16()
        ours = _least_ms(partial(kernels.paged_attention, q, k, v, batch, scale=0.125))
        theirs = _least_ms(_sdpa(num_seqs, context, chunk))
        yield f"attention, {what} of {num_seqs} x {chunk} at {context} (torch: contiguous float32)", ours, theirs


def _sdpa(num_seqs: int, context: int, chunk: int) -> Callable[[], Tensor]:
    q = torch.randn(num_seqs, 9, chunk, 64)
    k, v = torch.randn(num_seqs, 9, context, 64), torch.randn(num_seqs, 9, context, 64)
    mask = torch.ones(chunk, context, dtype=torch.bool).tril(context - chunk)
    return partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, attn_mask=mask)


def _add_norm(norm: torch.nn.Module, x: Tensor, residual: Tensor) -> object:
    return norm(x + residual)


def _silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def _multinomial(logits: Tensor) -> Tensor:
    return torch.multinomial(logits.softmax(1), 1)


def _top_logprobs(logits: Tensor) -> object:
    return logits.log_softmax(1).topk(5)


def _rows() -> Iterator[_Row]:
    weight, table = torch.ones(576).bfloat16(), torch.randn(4096, 64)
    norm = torch.nn.RMSNorm(576, dtype=torch.bfloat16)
    for rows in (1, 256):
        x, r = torch.randn(rows, 576).bfloat16(), torch.randn(rows, 576).bfloat16()
        yield (
            f"add and rms_norm, {rows} rows",
            _least_ms(partial(kernels.rms_norm, x, weight, 1e-5, r)),
            _least_ms(partial(_add_norm, norm, x, r)),
        )
        gated = torch.randn(rows, 3072).bfloat16()
        yield (
            f"silu_and_mul, {rows} rows",
            _least_ms(partial(kernels.silu_and_mul, gated)),
            _least_ms(partial(_silu_mul, gated)),
        )
        q, k, positions = torch.randn(rows, 9, 64), torch.randn(rows, 3, 64), torch.arange(rows, dtype=torch.int32)
        yield f"rope, {rows} rows", _least_ms(partial(kernels.rope_, q, k, positions, table)), float("nan")


def _samplings() -> Iterator[_Row]:
    for rows in (1, 8, 32):
        logits = torch.randn(rows, 49152) * 3
        ones, ids = torch.ones(rows), torch.arange(rows)
        for what, top_k, top_p in (("plain", 0, 1.0), ("top_p 0.95", 0, 0.95), ("top_k 50", 50, 1.0)):
            columns = (ones, torch.full((rows,), top_k), ones * top_p, ones * 0, ids, ids)
            ours = _least_ms(partial(kernels.sample, logits, *columns))
            theirs = _least_ms(partial(_multinomial, logits))
            yield f"sample {what}, {rows} rows (torch: softmax, multinomial)", ours, theirs
        ours = _least_ms(partial(kernels.logprobs, logits, ids, 5))
        yield f"logprobs 5, {rows} rows", ours, _least_ms(partial(_top_logprobs, logits))


def main() -> None:
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    kernels.set_num_threads(threads)
    sys.stdout.write(
        f"{kernels.numerics_name()}, {threads} threads\n| operator | ours, ms | torch, ms |\n|---|---|---|\n"
    )
    for rows in (_linears(), _experts(), _attentions(), _rows(), _samplings()):
        for what, ours, theirs in rows:
            sys.stdout.write(f"| {what} | {ours:.3f} | {theirs:.3f} |\n")


if __name__ == "__main__":
    main()
