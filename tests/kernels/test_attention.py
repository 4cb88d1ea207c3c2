from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import kernels
from kernels import AttentionBatch
from kernels.attention import SPLIT, TILE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True, slots=True)
class Options:
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 20
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    window: int = 0
    soft_cap: float = 0.0
    scales: kernels.KVScales = kernels.UNSCALED


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """A pool of NaN, into which sequences are written at random blocks."""

    options: Options
    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor  # int32 [num_seqs, max_blocks]
    sequences: list[Sequence]

    def attend(self, wanted: list[tuple[int, int]]) -> torch.Tensor:
        """Attention of the queries (sequence, position), one call."""
        q = torch.stack([self.sequences[s].q[p] for s, p in wanted])
        index = torch.tensor([s for s, _ in wanted], dtype=torch.int32)
        positions = torch.tensor([p for _, p in wanted], dtype=torch.int32)
        batch = AttentionBatch(self.tables, index, positions)
        o = self.options
        return kernels.paged_attention(
            q, self.k, self.v, batch, scale=0.3, window=o.window, soft_cap=o.soft_cap, scales=o.scales
        )

    def whole(self, sequence: int) -> torch.Tensor:
        return self.attend([(sequence, p) for p in range(self.sequences[sequence].length)])


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    q: torch.Tensor  # [length, num_heads, head_dim]
    k: torch.Tensor  # [length, num_kv_heads, head_dim]
    v: torch.Tensor

    @property
    def length(self) -> int:
        return self.q.shape[0]


def _sequence(length: int, options: Options, seed: int) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    heads = (options.num_heads, options.num_kv_heads, options.num_kv_heads)
    draws = (torch.randn(length, h, options.head_dim, generator=generator).to(options.dtype) for h in heads)
    return Sequence(*draws)


def _pool(lengths: list[int], options: Options, seed: int = 0, spare_blocks: int = 3) -> Pool:
    sequences = [_sequence(length, options, seed=100 + i) for i, length in enumerate(lengths)]
    counts = [-(-length // options.block_size) for length in lengths]
    shapes = kernels.kv_cache_shapes(
        sum(counts) + spare_blocks, options.block_size, options.num_kv_heads, options.head_dim
    )
    k, v = (torch.full(shape, torch.nan).to(options.cache_dtype) for shape in shapes)
    order = torch.randperm(shapes[0][0], generator=torch.Generator().manual_seed(seed)).tolist()
    tables = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32)
    for i, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        blocks = torch.tensor([order.pop() for _ in range(count)])
        tables[i, :count] = blocks
        positions = torch.arange(sequence.length)
        slots = blocks[positions // options.block_size] * options.block_size + positions % options.block_size
        kernels.write_kv(sequence.k, sequence.v, k, v, slots, options.scales)
    return Pool(options, k, v, tables, sequences)


def _exact(sequence: Sequence, options: Options) -> torch.Tensor:
    """The definition, in float64, over what the pool's dtype keeps of K and V."""
    group = options.num_heads // options.num_kv_heads
    kept = []
    for x, scale in ((sequence.k, options.scales.key), (sequence.v, options.scales.value)):
        stored = (x.float() / scale).to(options.cache_dtype)  # none is beyond FP8's largest
        kept.append(stored.double().repeat_interleave(group, dim=1) * scale)
    k, v = kept
    scores = torch.einsum("qhd,khd->hqk", sequence.q.double() * 0.3, k)
    if options.soft_cap:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    distance = torch.arange(sequence.length).unsqueeze(1) - torch.arange(sequence.length)
    seen = (distance >= 0) & (distance < (options.window or sequence.length))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


CASES = {
    "plain": Options(),
    "one head": Options(num_heads=1, num_kv_heads=1, head_dim=8),
    "many heads a group": Options(num_heads=50, num_kv_heads=1, head_dim=8),
    "head_dim 64, blocks of 32": Options(num_heads=9, num_kv_heads=3, head_dim=64, block_size=32),
    "blocks of 48": Options(block_size=48),
    "blocks of 256": Options(block_size=256),
    "bfloat16": Options(dtype=torch.bfloat16, cache_dtype=torch.bfloat16),
    "float16": Options(dtype=torch.float16, cache_dtype=torch.float16),
    "bfloat16 pool": Options(cache_dtype=torch.bfloat16),
    "fp8 pool": Options(dtype=torch.bfloat16, cache_dtype=kernels.FP8),
    "fp8 pool with scales": Options(cache_dtype=kernels.FP8, scales=kernels.KVScales(0.013, 0.7), block_size=32),
    "window": Options(window=100),
    "window of 1": Options(window=1),
    "soft cap": Options(soft_cap=2.0),
    "window and soft cap": Options(window=300, soft_cap=5.0, head_dim=8),
}
case = pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())

#: Both sides of a tile, a split and a block, and a third split.
LENGTHS = [1, 15, 16, 17, TILE - 1, TILE, TILE + 1, SPLIT, SPLIT + 1, 2 * SPLIT + 6]


@case
def test_follows_the_definition(implementation: object, options: Options) -> None:
    pool = _pool(LENGTHS, options)
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[options.dtype]
    for i, sequence in enumerate(pool.sequences):
        result = pool.whole(i)
        assert result.dtype == options.dtype
        torch.testing.assert_close(result.double(), _exact(sequence, options), rtol=tolerance, atol=tolerance)


@case
def test_chunks_and_single_tokens_give_the_bits_of_the_whole(native: None, options: Options) -> None:
    length = 2 * SPLIT + 40
    pool = _pool([length], options)
    whole = pool.whole(0)
    for size in (1, 7, 64, 100, 256):
        chunks = [
            pool.attend([(0, p) for p in range(start, min(start + size, length))]) for start in range(0, length, size)
        ]
        assert torch.equal(torch.cat(chunks), whole), size


def test_the_reference_too(implementation: object) -> None:
    pool = _pool([SPLIT + 40], Options(window=200))
    whole = pool.whole(0)
    for start, stop in ((0, 7), (7, 200), (200, 201), (250, 260), (SPLIT, SPLIT + 40)):
        assert torch.equal(pool.attend([(0, p) for p in range(start, stop)]), whole[start:stop])


@case
def test_neighbours_blocks_and_threads_change_no_bit(native: None, options: Options) -> None:
    length = SPLIT + 90
    alone = _pool([length], options).whole(0)
    pool = _pool([length, 300, 5, 64], options, seed=1, spare_blocks=9)
    assert not torch.equal(pool.tables[0], _pool([length], options).tables[0])
    decodes = [(1, 299), (0, length - 1), (2, 4), (0, 3), (3, 63)]
    mixed = [(3, 63), *((0, p) for p in range(SPLIT - 20, SPLIT + 50)), *((1, p) for p in range(250, 300)), (0, 0)]
    for threads in (1, 2, 3):
        kernels.set_num_threads(threads)
        assert torch.equal(pool.attend(decodes)[[1, 3]], alone[[length - 1, 3]])
        result = pool.attend(mixed)
        assert torch.equal(result[1:71], alone[SPLIT - 20 : SPLIT + 50])
        assert torch.equal(result[-1], alone[0])
        # One long query alone: with several threads its splits are computed apart and merged.
        assert torch.equal(pool.attend([(0, length - 1)])[0], alone[length - 1])


def test_the_block_size_changes_no_bit(native: None) -> None:
    results = [_pool([400], Options(block_size=size)).whole(0) for size in (16, 32, 48, 256)]
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_any_number_of_rows(native: None) -> None:
    pool = _pool([300, 300], Options(num_heads=4, num_kv_heads=2, head_dim=24))
    whole = pool.whole(0)
    for rows in (*range(1, 41), 64, 100, 257):
        wanted = [(0, p) for p in range(300 - rows, 300)]
        assert torch.equal(pool.attend(wanted), whole[-rows:]), rows


def test_a_query_does_not_see_what_is_behind_it(implementation: object) -> None:
    pool = _pool([100], Options())
    before = pool.whole(0)
    # Position 60 on: values that would show, in the tile that position 59 reads.
    for position in range(60, 100):
        block, offset = pool.tables[0, position // 16], position % 16
        pool.k[block, :, :, offset], pool.v[block, :, offset] = torch.nan, torch.inf
    assert torch.equal(pool.whole(0)[:60], before[:60])


def test_reads_queries_with_a_stride(implementation: object) -> None:
    pool = _pool([50], Options())
    q = torch.cat([pool.sequences[0].q.flatten(1), torch.full((50, 30), torch.nan)], dim=1)
    batch = AttentionBatch(pool.tables, torch.zeros(50, dtype=torch.int32), torch.arange(50, dtype=torch.int32))
    strided = kernels.paged_attention(q[:, :120].view(50, 6, 20), pool.k, pool.v, batch, scale=0.3)
    assert torch.equal(strided, pool.whole(0))


def test_large_scores_do_not_overflow(implementation: object) -> None:
    options = Options()
    pool = _pool([90], options)
    sequence = pool.sequences[0]
    sequence.q.mul_(1000)
    torch.testing.assert_close(pool.whole(0).double(), _exact(sequence, options), rtol=1e-3, atol=1e-3)


def test_a_query_that_is_not_a_number_stays_one_and_spoils_no_other(implementation: object) -> None:
    pool = _pool([70], Options())
    before = pool.whole(0)
    pool.sequences[0].q[33] = torch.nan
    after = pool.whole(0)
    assert bool(torch.isnan(after[33]).all())
    others = torch.arange(70) != 33
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize(("sequence", "position"), [(2, 0), (-1, 0), (0, -1), (0, 48), (1, 20)], ids=str)
def test_refuses_what_does_not_exist(native: None, sequence: int, position: int) -> None:
    pool = _pool([40, 10], Options())
    batch = AttentionBatch(
        pool.tables, torch.tensor([sequence], dtype=torch.int32), torch.tensor([position], dtype=torch.int32)
    )
    with pytest.raises(IndexError, match="a sequence, position or block that does not exist"):
        kernels.paged_attention(torch.zeros(1, 6, 20), pool.k, pool.v, batch, scale=1.0)
