"""The bits of every native operator, against digests committed to the repository.

The same on every CPU (AVX2 and AVX-512), compiler and thread count. A digest that changes means that
`kernels.backend.NUMERICS` must be raised, then `python -m tests.kernels.test_bits` writes new ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels

GOLDEN = Path(__file__).parents[1] / "golden" / "operator_bits.json"


def _draw(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values made of integers, because torch's normal numbers differ between instruction sets."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-(2**16), 2**16, shape, generator=generator) + torch.randint(
        -(2**16), 2**16, shape, generator=generator
    )
    return (whole.to(torch.float32) * (scale * 2.0**-16)).to(dtype)


def _linear(dtype: torch.dtype) -> list[Tensor]:
    x, weight = _draw(37, 331, seed=1, dtype=dtype), _draw(100, 331, seed=2, dtype=dtype)
    packed = kernels.pack_linear(weight)
    results = [kernels.linear(x[:rows], packed, out_dtype=torch.float32) for rows in range(1, 38, 4)]
    return [*results, kernels.linear(x, packed, _draw(100, seed=3, dtype=dtype))]


def _attention(dtype: torch.dtype) -> list[Tensor]:
    k_shape, v_shape = kernels.kv_cache_shapes(40, 16, 2, 40)
    k_cache, v_cache = torch.zeros(k_shape, dtype=dtype), torch.zeros(v_shape, dtype=dtype)
    k, v = _draw(600, 2, 40, seed=4, dtype=dtype), _draw(600, 2, 40, seed=5, dtype=dtype)
    kernels.write_kv(k, v, k_cache, v_cache, torch.arange(600))
    positions = torch.arange(600, dtype=torch.int32)
    batch = kernels.AttentionBatch(
        torch.arange(40, dtype=torch.int32).view(1, -1), torch.zeros(600, dtype=torch.int32), positions
    )
    q = _draw(600, 6, 40, seed=6, scale=3.0, dtype=dtype)
    options: tuple[dict[str, float], ...] = ({}, {"window": 300}, {"soft_cap": 4.0})
    return [kernels.paged_attention(q, k_cache, v_cache, batch, scale=0.4, **o) for o in options]  # type: ignore[arg-type]


def _row_operators(dtype: torch.dtype) -> list[Tensor]:
    x, residual, weight = (_draw(9, 100, seed=s, dtype=dtype) for s in (7, 8, 9))
    normed, total = kernels.rms_norm(x, weight[0].contiguous(), 1e-5, residual)
    q, k, table = _draw(9, 3, 20, seed=10, dtype=dtype), _draw(9, 1, 20, seed=11, dtype=dtype), _draw(50, 20, seed=12)
    kernels.rope_(q, k, torch.arange(9) * 5, table.float())
    return [normed, total, kernels.silu_and_mul(_draw(9, 200, seed=13, scale=20.0, dtype=dtype)), q, k]


def _other_row_operators(dtype: torch.dtype) -> list[Tensor]:
    x, wide = _draw(9, 100, seed=15, dtype=dtype), _draw(100, seed=16).float()
    heads, narrow = _draw(9, 3, 20, seed=17, dtype=dtype), _draw(20, seed=18, dtype=dtype)
    kernels.head_norm_(heads, narrow, 1e-6)
    return [
        kernels.rms_norm(x, wide, 1e-6)[0],
        heads,
        kernels.gelu_and_mul(_draw(9, 200, seed=19, scale=20.0, dtype=dtype)),
    ]


def _experts(dtype: torch.dtype) -> list[Tensor]:
    x, logits = _draw(23, 100, seed=20, dtype=dtype), _draw(23, 20, seed=21).float()
    experts = kernels.empty_experts(20, 100, 36, dtype=dtype, device=torch.device("cpu"))
    for expert in range(20):
        gate, up, down = (_draw(36, 100, seed=22 + 3 * expert + n, scale=0.1, dtype=dtype) for n in range(3))
        experts.fill(expert, gate, up, down.t())
    routes = [kernels.route(logits, 4, renormalize=renormalize) for renormalize in (False, True)]
    return [*routes[0], *routes[1], *(kernels.mix_experts(x, *route, experts) for route in routes)]


def _sampling(dtype: torch.dtype) -> list[Tensor]:
    logits, ids = _draw(24, 5003, seed=14, scale=8.0, dtype=dtype).float(), torch.arange(24)
    ones, third = torch.ones(24), ids % 3
    top_k, top_p, min_p = (third == 0) * 40, 1 - 0.1 * (third == 1), 0.02 * (third == 2)
    chosen = kernels.sample(logits, ones * 0.8, top_k, top_p.float(), min_p.float(), ids * 12345678901, ids)
    found = kernels.logprobs(logits, chosen, 20)
    noise = kernels.gumbel_noise(ids * 98765432109, ids, 5003)
    return [chosen, noise, found.own, found.rank, found.top_ids, found.top]


_OPERATORS: dict[str, Callable[[torch.dtype], list[Tensor]]] = {
    "linear": _linear,
    "attention": _attention,
    "row operators": _row_operators,
    "other row operators": _other_row_operators,
    "experts": _experts,
    "sampling": _sampling,
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _digest(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()))
    return digest.hexdigest()


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("operator", _OPERATORS)
def test_bits_are_those_of_this_numerics(native: None, operator: str, dtype: str) -> None:
    golden = json.loads(GOLDEN.read_text())
    assert golden["numerics"] == kernels.NUMERICS
    for threads in (1, 2):
        kernels.set_num_threads(threads)
        assert _digest(_OPERATORS[operator](_DTYPES[dtype])) == golden[f"{operator}, {dtype}"]


def main() -> None:
    kernels.start(kernels.Implementation.NATIVE)
    digests = {
        f"{name}, {dtype}": _digest(operator(_DTYPES[dtype]))
        for name, operator in _OPERATORS.items()
        for dtype in _DTYPES
    }
    GOLDEN.write_text(json.dumps({"numerics": kernels.NUMERICS} | digests, indent=1) + "\n")


if __name__ == "__main__":
    main()
