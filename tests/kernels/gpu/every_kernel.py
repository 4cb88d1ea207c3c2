"""Launches every kernel at small sizes, for a checker of memory accesses:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.kernels.gpu.every_kernel

(or `--tool racecheck`, which reports the library's own products too: theirs are no kernels of ours).
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from dataclasses import replace

import pytest
import torch
from triton.runtime.jit import JITFunction

import kernels
from kernels import gpu
from kernels.gate import Activation
from kernels.gpu import decode, vector
from kernels.gpu.launch import limits
from kernels.gpu.noise import gumbel_noise
from tests.kernels.gpu.cases import AttentionCase, step_start

DEVICE = torch.device("cuda", 0)
BF16 = torch.bfloat16


def _random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def launch_row_operators() -> None:
    x, weight = _random(5, 200), _random(200)
    kernels.rms_norm(x, weight, 1e-5, x.clone())
    kernels.silu_and_mul(_random(3, 250)[:, :200])
    kernels.soft_cap_(_random(3, 1001, dtype=torch.float32), 30.0)
    ids, last = (torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in ([3, -1, -2], [5, 8]))
    kernels.embed_ahead(ids, step_start(last, 1200), _random(9, 200), BF16)


def launch_products() -> None:
    """Of each tile, with and without remainders of K; 1024 columns are held whole."""
    for num_out, num_in, dtype in ((4100, 264, BF16), (100, 1024, BF16), (100, 200, torch.float32)):
        weight = kernels.pack_linear(_random(num_out, num_in, dtype=dtype))
        bias = _random(num_out, dtype=torch.float32)
        for rows in (1, 17, 33, 65) if dtype is BF16 else (1, 33):
            x = _random(rows, num_in, dtype=dtype)
            kernels.linear(x, weight, bias, out_dtype=torch.float32)
            kernels.linear(x, weight)
            kernels.add_linear(x, weight, None, _random(rows, num_out, dtype=dtype))
            kernels.gated_linear(x, weight, None, Activation.SILU)
        kernels.normed_linear(x[:1], kernels.RowNorm(_random(num_in, dtype=dtype), 1e-5), weight)
    vector.multiply(_random(1, 264), _random(100, 264), None, BF16, residual=_random(1, 100))


def launch_experts() -> None:
    packed = kernels.empty_experts(5, 200, 48, dtype=BF16, device=DEVICE)
    for expert in range(5):
        packed.fill(expert, _random(48, 200), _random(48, 200), _random(200, 48))
    for rows in (1, 40):
        chosen, weights = kernels.route(_random(rows, 5, dtype=torch.float32), 3, renormalize=True)
        kernels.mix_experts(_random(rows, 200), chosen, weights, packed)


def launch_attention(patch: pytest.MonkeyPatch) -> None:
    """Of single tokens, walked, spread and early, and of long and short chunks; to both kinds of pool."""
    patch.setattr(decode, "_LONG_SPLITS", 1)
    walked = decode.Spread(1, 2, 3, walk=True), decode.Spread(2, 2, 3, walk=True)
    spreads = (*walked, decode.Spread(2, 2, 3), decode.Spread(2, 4, 3, early=True))
    for dtype, head_dim in ((BF16, 80), (BF16, 128), (torch.float32, 48)):
        case = AttentionCase.draw(
            *(8, 2, head_dim), dtype=dtype, block_size=16, starts=(0, 300, 30, 290), counts=(1, 1, 20, 130)
        )
        norms = kernels.HeadNorms(*_random(2, head_dim, dtype=dtype), 1e-6)
        for each, spread in itertools.product((case, case.with_fp8(kernels.KVScales(0.02, 0.01))), spreads):
            patch.setattr(decode, "choose_spread", lambda *a, spread=spread, **k: spread)
            replace(each.on(DEVICE), norms=norms).run(0, 0.0)
            each.on(DEVICE).in_items(spread.programs - 1).run(0, 0.0)
    case.on(DEVICE).run(100, 2.0)


def launch_sampling() -> None:
    rows, vocab = 4, 10_001
    logits = _random(rows, vocab, dtype=torch.float32)
    number = torch.arange(rows, device=DEVICE)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.3], device=DEVICE)
    top_k, top_p = (number % 2 * 40).int(), torch.full((rows,), 0.9, device=DEVICE)
    last = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    kernels.sample_ahead(logits, temperature, top_k, top_p, top_p * 0.01, number, number.int(), number.int(), last)
    kernels.logprobs_ahead(logits, number.int(), 5)
    gumbel_noise(number, number, 1000)


def not_launched() -> list[str]:
    """Names of our kernels that this process has not compiled."""
    names = {module.name for module in pkgutil.iter_modules(gpu.__path__)}
    if not limits(DEVICE).warpgroups:
        names -= {"hopper", "rings"}
    modules = [importlib.import_module(f"{gpu.__name__}.{name}") for name in sorted(names)]
    found = {value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)}
    ours = [kernel for kernel in found if kernel.__name__.endswith("_kernel")]
    return sorted(kernel.__name__ for kernel in ours if not any(cache[0] for cache in kernel.device_caches.values()))


def launch_all() -> None:
    launch_row_operators()
    launch_products()
    launch_experts()
    with pytest.MonkeyPatch.context() as patch:
        launch_attention(patch)
    launch_sampling()


def main() -> None:
    for dtype in (BF16, torch.float32):
        kernels.start_gpu(DEVICE, dtype)
    kernels.compile_ahead(launch_all)
    launch_all()
    torch.cuda.synchronize()
    left = not_launched()
    if left:
        raise SystemExit(f"not launched: {', '.join(left)}")


if __name__ == "__main__":
    main()
