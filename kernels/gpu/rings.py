"""Loading for `kernels.gpu.hopper`: rings of slots in shared memory, and the warp that fills them."""

from __future__ import annotations

from typing import Any, NamedTuple

from kernels._gluon import gl, gluon, mbarrier, tma

#: Rows of a group of warps, which is an instruction's, and keys of a tile, which is the contract's.
ROWS = gl.constexpr(64)
TILE = gl.constexpr(64)


class Ring(NamedTuple):
    """Slots of shared memory that are filled and read in turn."""

    slots: Any
    filled: Any  # a barrier a slot: what was asked for is there
    free: Any  # a barrier a slot: both groups have read it


class Rings(NamedTuple):
    """`q` has the slots of two items, one for each group; `k` and `v` have a tile a slot. `items` [2, 4] are numbers of
    the items whose queries `q` has: first row, rows (0: there are no more), first position, first head."""

    q: Ring
    k: Ring
    v: Ring
    items: Any


class Work(NamedTuple):
    """Items are all tiles of queries by all groups of heads, in the order of the tiles. A program's first is its own
    number; `taken_ptr` counts further ones, which go to whoever asks, and is zero between launches."""

    tiles_ptr: Any
    positions_ptr: Any
    taken_ptr: Any
    num_items: Any


class Source(NamedTuple):
    """Where `load` copies from: descriptors of queries [M, HQ, D] and of the pool as rows [slots, D]."""

    q_desc: Any
    k_desc: Any
    v_desc: Any
    tables_ptr: Any
    seq_index_ptr: Any
    max_blocks: Any


@gluon.jit
def make_ring(dtype, COUNT: gl.constexpr, EACH: gl.constexpr, D: gl.constexpr):
    """A ring of COUNT times EACH matrices [64, D]."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, D], dtype)
    slots = gl.allocate_shared_memory(dtype, [COUNT * EACH, TILE, D], LAYOUT)
    filled = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(COUNT):
        mbarrier.init(filled.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
    return Ring(slots, filled, free)


@gluon.jit
def wait_filled(ring, n):
    """Wait for what was asked for as the ring's n-th."""
    COUNT: gl.constexpr = ring.filled.shape[0]
    mbarrier.wait(ring.filled.index(n % COUNT), n // COUNT & 1)


@gluon.jit
def wait_free(ring, n):
    """Wait until both groups have read what was there before the ring's n-th."""
    COUNT: gl.constexpr = ring.filled.shape[0]
    mbarrier.wait(ring.free.index(n % COUNT), n // COUNT & 1 ^ 1)


@gluon.jit
def release(ring, n):
    """This group has read the ring's n-th."""
    mbarrier.arrive(ring.free.index(n % ring.filled.shape[0]))


@gluon.jit
def take(work):
    """The next item that no program has, or a number behind the last, which every program takes once: the one that
    takes the last of these leaves the counter as it was."""
    taken = gl.atomic_add(work.taken_ptr, 1, sem="relaxed")
    if taken == work.num_items - 1:
        gl.store(work.taken_ptr, 0)
    return gl.num_programs(0) + taken


@gluon.jit
def announce(rings, n, first, count, start, head):
    """Leave the n-th item's numbers for both groups. They are told when its slot of queries is filled."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    at = gl.arange(0, 4, LAYOUT)
    wait_free(rings.q, n)
    rings.items.index(n % 2).store(gl.where(at < 2, gl.where(at == 0, first, count), gl.where(at == 2, start, head)))


@gluon.jit
def announced(rings, n):
    """(first row, rows, first position, first head) of the n-th item, once its queries are there."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    wait_filled(rings.q, n)
    numbers, at = rings.items.index(n % 2).load(LAYOUT), gl.arange(0, 4, LAYOUT)
    found = ()
    for part in gl.static_range(4):
        found = found + (gl.sum(gl.where(at == part, numbers, 0), 0),)  # noqa: RUF005 - no stars in a kernel
    return found


@gluon.jit
def copy(desc, blocks, offset, kv_head, ring, n, HKV: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """Ask for the tile that lies in `blocks`, from `offset` of the first on, as the ring's n-th."""
    BOX: gl.constexpr = desc.block_shape[0]
    COUNT: gl.constexpr = ring.filled.shape[0]
    filled, slot = ring.filled.index(n % COUNT), ring.slots.index(n % COUNT)
    wait_free(ring, n)
    mbarrier.expect(filled, TILE * desc.block_shape[1] * 2)
    for part in gl.static_range(TILE // BOX):
        row = (blocks[part] * HKV + kv_head) * BLOCK_SIZE + offset
        tma.async_copy_global_to_shared(desc, [row, 0], filled, slot.slice(part * BOX, BOX))


@gluon.jit
def copy_queries(desc, first, head, ring, n):
    """Ask for the queries of both groups. Rows behind the tile's are another's: nothing is made of them."""
    SHAPE: gl.constexpr = desc.block_shape
    filled = ring.filled.index(n % 2)
    mbarrier.expect(filled, 2 * ROWS * SHAPE[2] * 2)
    for group in gl.static_range(2):
        slot = ring.slots.index(n % 2 * 2 + group)._reinterpret(desc.dtype, SHAPE, desc.layout)
        tma.async_copy_global_to_shared(desc, [first + group * SHAPE[0], head, 0], filled, slot)


@gluon.jit
def load(source, work, rings, HQ: gl.constexpr, HKV: gl.constexpr, BLOCK_SIZE: gl.constexpr, PACK: gl.constexpr):
    """The part of the warp that loads. It takes an item when all of the one before is asked for, while the groups are
    some tiles behind."""
    GROUPS: gl.constexpr = HQ // PACK
    BOX: gl.constexpr = source.k_desc.block_shape[0]
    item = gl.program_id(0)
    num_items = 0
    num_tiles = 0
    while item < work.num_items:
        place = work.tiles_ptr + 2 * (item // GROUPS)
        first, count = gl.load(place), gl.load(place + 1)
        if count > 0:
            table_ptr = source.tables_ptr + gl.load(source.seq_index_ptr + first).to(gl.int64) * source.max_blocks
            position = gl.load(work.positions_ptr + first)
            end = position + count
            head = item % GROUPS * PACK
            announce(rings, num_items, first, count, position, head)
            copy_queries(source.q_desc, first, head, rings.q, num_items)
            for start in range(0, end, TILE):
                blocks = ()
                for part in gl.static_range(TILE // BOX):
                    # What follows the last block has no number: the last stands for it.
                    block = gl.minimum(start + part * BOX, end - 1) // BLOCK_SIZE
                    blocks = blocks + (gl.load(table_ptr + block),)  # noqa: RUF005 - no stars in a kernel
                offset = start % BLOCK_SIZE if BLOCK_SIZE > TILE else 0
                kv_head = head // (HQ // HKV)
                copy(source.k_desc, blocks, offset, kv_head, rings.k, num_tiles, HKV, BLOCK_SIZE)
                copy(source.v_desc, blocks, offset, kv_head, rings.v, num_tiles, HKV, BLOCK_SIZE)
                num_tiles += 1
            num_items += 1
        item = take(work)
    announce(rings, num_items, 0, 0, 0, 0)
    mbarrier.arrive(rings.q.filled.index(num_items % 2))
