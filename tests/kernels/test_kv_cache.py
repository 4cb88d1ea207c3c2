import pytest
import torch

import kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_shapes() -> None:
    assert kernels.kv_cache_shapes(7, 32, 3, 64) == ((7, 3, 64, 32), (7, 3, 32, 64))
    assert kernels.kv_cache_shapes(7, 16, 3, 20) == ((7, 3, 20, 16), (7, 3, 16, 32))
    for wrong in (0, 8, 24, -16):
        with pytest.raises(ValueError, match=f"block_size must be a positive multiple of 16, got {wrong}"):
            kernels.kv_cache_shapes(7, wrong, 3, 64)


@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 20), (32, 64), (48, 8)])
def test_writes_every_slot_and_nothing_else(
    implementation: object, block_size: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    k_shape, v_shape = kernels.kv_cache_shapes(5, block_size, 2, head_dim)
    k_cache, v_cache = torch.full(k_shape, 9.0).to(cache_dtype), torch.full(v_shape, 9.0).to(cache_dtype)
    fused = torch.randn(11, 4 * head_dim).to(dtype)
    k, v = fused[:, : 2 * head_dim].view(11, 2, head_dim), fused[:, 2 * head_dim :].view(11, 2, head_dim)
    slots = torch.randperm(5 * block_size)[:11]
    kernels.write_kv(k, v, k_cache, v_cache, slots)
    by_slot_k = k_cache.permute(0, 3, 1, 2).reshape(5 * block_size, 2, head_dim)
    by_slot_v = v_cache.permute(0, 2, 1, 3).reshape(5 * block_size, 2, -1)[..., :head_dim]
    untouched = torch.ones(5 * block_size, dtype=torch.bool).index_fill(0, slots, False)
    for by_slot, source in ((by_slot_k, k), (by_slot_v, v)):
        assert torch.equal(by_slot[slots], source.to(cache_dtype))
        assert bool((by_slot[untouched] == 9).all())


def _written(k: torch.Tensor, v: torch.Tensor, scales: kernels.KVScales) -> tuple[torch.Tensor, torch.Tensor]:
    """What an FP8 pool holds of k and v [rows, 1, 16], as float32 [rows, 16]."""
    rows = k.shape[0]
    blocks = -(-rows // 16)
    k_cache, v_cache = (torch.zeros(shape).to(kernels.FP8) for shape in kernels.kv_cache_shapes(blocks, 16, 1, 16))
    kernels.write_kv(k, v, k_cache, v_cache, torch.arange(rows), scales)
    keys = k_cache.float().permute(0, 3, 1, 2).reshape(-1, 16)[:rows]
    return keys, v_cache.float().reshape(-1, 16)[:rows]


def test_fp8_of_every_code_and_what_lies_between(implementation: object) -> None:
    """Numbers of FP8 stay, halves between two go to the even one, as torch has it; what is too large saturates."""
    numbers = torch.arange(256, dtype=torch.uint8).view(kernels.FP8).float()
    finite = numbers[torch.isfinite(numbers)].sort().values
    between = (finite[1:] + finite[:-1]) / 2
    near = torch.cat([torch.nextafter(between, torch.tensor(x)) for x in (torch.inf, -torch.inf)])
    special = torch.tensor([0.0, -0.0, 449.0, 465.0, -1e30, torch.inf, -torch.inf, torch.nan, 1e-40])
    x = torch.cat([finite, between, near, special])
    x = torch.nn.functional.pad(x, (0, -len(x) % 16)).view(-1, 1, 16)
    expected = x.clamp(-448, 448).to(kernels.FP8).float().view(-1, 16)
    keys, values = _written(x, x.flip(2), kernels.UNSCALED)
    torch.testing.assert_close(keys, expected, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(values, expected.flip(1), equal_nan=True, rtol=0, atol=0)


def test_fp8_of_numbers_over_scales(implementation: object) -> None:
    k, v = torch.randn(40, 1, 16) * 900, (torch.randn(40, 1, 16) * 0.01).bfloat16().float()
    keys, values = _written(k, v, kernels.KVScales(3.7, 2e-4))
    for found, x, scale in ((keys, k, 3.7), (values, v, 2e-4)):
        over = x.view(-1, 16) / torch.tensor(scale)
        assert torch.equal(found, over.clamp(-448, 448).to(kernels.FP8).float())
        assert float(((found - over).abs() / over.abs())[over.abs() < 448].median()) < 2**-4


@pytest.mark.parametrize("slot", [-1, 80])
def test_refuses_slots_outside_the_pool(native: None, slot: int) -> None:
    k_shape, v_shape = kernels.kv_cache_shapes(5, 16, 1, 8)
    k_cache, v_cache = torch.zeros(k_shape), torch.zeros(v_shape)
    with pytest.raises(IndexError, match=r"slots must be in 0..79"):
        kernels.write_kv(torch.ones(2, 1, 8), torch.ones(2, 1, 8), k_cache, v_cache, torch.tensor([3, slot]))
    assert not k_cache.any()
