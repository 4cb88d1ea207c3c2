"""Matrix products that add over K in order, so that a row has the same bits in a call of any size.

Up to 64 rows, or 128 of small weights: our tiles of 16, 32 or 64 rows. Above: cuBLASLt with split-K
forbidden (`library.py`), which was measured to give the same bits in the types it is used for. Everything a
library does not do in that way (float32, a bias added before rounding) stays with the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels._triton import tl, triton
from kernels.gate import Activation
from kernels.gpu import library
from kernels.gpu.activation import activate_and_mul, active_times
from kernels.gpu.launch import Limits, begin, limits, wait

#: Above this many rows the library is faster than the tiles (H200: 4.22 against 4.27 ms of a model's
#: products at 64 rows, 5.04 against 4.65 at 128).
MOST_TILE_ROWS = 64

#: The same for small weights, of which the library makes few programs (1024 columns of 3072, 64 rows: 75 us against 7).
MOST_TILE_ROWS_OF_SMALL = 128

#: The same for float32 results, where up to here the library gains 2 % (128,256 x 4096: 96 rows 291 us against 284, 128
#: rows 303 against 297, but 160 rows 459 against 306 and 256 rows 503 against 397).
MOST_TILE_ROWS_TO_FLOAT32 = 128

#: Float32 results are the library's from so many columns on, which heads have, where K is whole steps of the tiles and
#: columns come by eights: such products of 6144 to 151,936 columns had the tiles' bits, for 14 numbers of rows from 65
#: to 512, in bfloat16 and float16. 5004 x 1544, in both types, had others for all of them.
LEAST_HEAD, _HEAD_STEP = 32_000, 64

#: A weight is small with so few columns, or with so few elements (of a gated product, those of one half).
_FEW_COLUMNS, _FEW_ELEMENTS = 2048, 1 << 22


@triton.jit
def prefetch(pointers):
    """Ask L2 for the lines at these addresses: for weights, before the wait."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def add_product(x, w_ptrs, k_inside, acc, EVEN_K: tl.constexpr, SWAP: tl.constexpr):
    """acc + x wᵀ for x [BM, BK] and w [BN, BK]; with SWAP acc is transposed and w the left operand."""
    w = tl.load(w_ptrs) if EVEN_K else tl.load(w_ptrs, mask=k_inside[None, :], other=0.0)
    if SWAP:
        return tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision="ieee")


@triton.jit
def bias_block(pointers, inside, SWAP: tl.constexpr):
    bias = tl.load(pointers, mask=inside, other=0.0)
    return bias[:, None] if SWAP else bias[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    num_rows,
    x_stride,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    SWAP: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = x Wᵀ + bias. GATED: rows n and n + NUM_OUT of the weight are gate and up of column n, by SiLU or GELU. ADD:
    a residual [num_rows, NUM_OUT] is added. SWAP: weights are the left operand, whose 64 rows the tensor core wants
    (wgmma)."""
    begin(PDL)
    EVEN_K: tl.constexpr = NUM_IN % BK == 0
    num_row_tiles = tl.cdiv(num_rows, BM)
    m = (tl.program_id(0) % num_row_tiles) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) // num_row_tiles) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    m_inside = m < num_rows
    n_inside = n < NUM_OUT
    w_row = tl.where(n_inside, n, 0)  # a column outside reads row 0 and is not stored
    w_ptrs = weight_ptr + w_row.to(tl.int64)[:, None] * NUM_IN + k[None, :]
    GATE_TO_UP: tl.constexpr = NUM_OUT * NUM_IN
    if PREFETCH > 0:
        lines = tl.arange(0, PREFETCH // 64) * 64
        prefetch(weight_ptr + w_row.to(tl.int64)[:, None] * NUM_IN + lines[None, :])
        if GATED:
            prefetch(weight_ptr + GATE_TO_UP + w_row.to(tl.int64)[:, None] * NUM_IN + lines[None, :])
    wait(PDL)
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    acc_up = acc
    for first in range(0, NUM_IN, BK):
        k_inside = k < NUM_IN - first
        x = tl.load(x_ptrs, mask=m_inside[:, None] if EVEN_K else m_inside[:, None] & k_inside[None, :], other=0.0)
        acc = add_product(x, w_ptrs, k_inside, acc, EVEN_K, SWAP)
        if GATED:
            acc_up = add_product(x, w_ptrs + GATE_TO_UP, k_inside, acc_up, EVEN_K, SWAP)
        x_ptrs += BK
        w_ptrs += BK
    if HAS_BIAS:  # no plain sum: where K is one step, the compiler would begin the chain with the bias
        acc = tl.fma(acc, 1.0, bias_block(bias_ptr + n, n_inside, SWAP))
        if GATED:
            acc_up = tl.fma(acc_up, 1.0, bias_block(bias_ptr + NUM_OUT + n, n_inside, SWAP))
    T: tl.constexpr = y_ptr.dtype.element_ty
    y = active_times(acc, acc_up, GELU, T) if GATED else acc.to(T)
    if SWAP:
        cells = m.to(tl.int64)[None, :] * NUM_OUT + n[:, None]
        inside = m_inside[None, :] & n_inside[:, None]
    else:
        cells = m.to(tl.int64)[:, None] * NUM_OUT + n[None, :]
        inside = m_inside[:, None] & n_inside[None, :]
    if ADD:
        y = (tl.load(residual_ptr + cells, mask=inside, other=0.0).to(tl.float32) + y.to(tl.float32)).to(T)
    tl.store(y_ptr + cells, y, mask=inside)


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of a program: `rows` of x by `columns` of the result, `depth` of K at a time.

    `swap`: weights are the left operand. `prefetch`: columns of the weight asked for ahead.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swap: bool
    prefetch: int = 0


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x [M, K] (rows may have a stride) times weight [N, K] transposed, plus float32 bias [N]: [M, N]."""
    tile = choose_tile(x, weight, has_bias=bias is not None, gated=False, out_dtype=out_dtype)
    if tile is None:
        return library.multiply(x, weight, out_dtype)
    y = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype, device=x.device)
    if x.shape[0]:
        _launch(tile, x, weight, bias, None, y)
    return y


def add_linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor | None:
    """`residual` [M, N] + `linear`, the product rounded before the sum; None where the tiles are not the fastest."""
    tile = choose_tile(x, weight, has_bias=bias is not None, gated=False, out_dtype=x.dtype)
    if tile is None:
        return None
    y = torch.empty_like(residual)
    if x.shape[0]:
        _launch(tile, x, weight, bias, residual, y)
    return y


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation = Activation.SILU) -> Tensor:
    """activation(x Wgᵀ + bg) * (x Wuᵀ + bu) for weight [2 * I, K], gate first: [M, I] in x.dtype.

    The same bits as `linear` followed by `activate_and_mul`.
    """
    tile = choose_tile(x, weight, has_bias=bias is not None, gated=True, out_dtype=x.dtype)
    if tile is None:
        return activate_and_mul(library.multiply(x, weight, x.dtype), activation)
    y = torch.empty(x.shape[0], weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    if x.shape[0]:
        _launch(tile, x, weight, bias, None, y, gate=activation)
    return y


def choose_tile(x: Tensor, weight: Tensor, *, has_bias: bool, gated: bool, out_dtype: torch.dtype) -> Tile | None:
    """The tile for a product; None is the library's. Free to choose: all give the same bits."""
    num_rows, num_in = x.shape
    num_out = weight.shape[0] // 2 if gated else weight.shape[0]
    if x.dtype == torch.float32:  # no tensor core adds exactly in float32: plain multiply-adds, small tiles
        return Tile(16 if num_rows <= 16 else 64, 32, 32, 4, 2, swap=False)
    few_columns = num_out <= _FEW_COLUMNS and not gated
    small = few_columns or num_out * num_in <= _FEW_ELEMENTS
    to_float32 = out_dtype != x.dtype
    # Rows that do not begin on 16 bytes may get another family of the library's kernels, with other bits.
    aligned = num_in * x.element_size() % 16 == 0 and weight.shape[0] % 8 == 0
    float32_too = num_out >= LEAST_HEAD and num_in % _HEAD_STEP == 0 and library.gives_float32(x.dtype)
    library_can = x.is_cuda and aligned and not has_bias and (not to_float32 or float32_too)
    if num_rows > (MOST_TILE_ROWS_OF_SMALL if small else MOST_TILE_ROWS):
        too_few = to_float32 and num_rows <= MOST_TILE_ROWS_TO_FLOAT32
        return None if library_can and not too_few else Tile(128, 128, 64, 8, 3, swap=False)
    if few_columns:
        return _tile_of_few_columns(num_rows, num_out, num_in)
    if small:
        return _tile_of_small(num_rows, num_out, num_in, gated=gated)
    if num_rows > 32:
        if library_can and not gated and not to_float32 and num_out < 6144:
            return None
        if to_float32:  # the head
            return Tile(64, 64, 64, 4, 3, swap=False, prefetch=256)
        return Tile(64, 64, 128, 4, 4 if gated else 5, swap=False, prefetch=256)
    if num_out < 4096:  # few columns: narrow tiles, or most processors would have none
        return Tile(16 if num_rows <= 16 else 32, 32, 128, 4, 5, swap=False, prefetch=256)
    if num_rows > 16:
        return Tile(32, 64, 128, 4, 4 if gated else 5, swap=True, prefetch=256)
    if gated:
        # From some rows on three stages, so that the next kernel's programs fit beside these.
        return Tile(16, 64, 128, 4, 4, swap=True) if num_rows <= 4 else Tile(16, 64, 128, 4, 3, swap=True, prefetch=256)
    if to_float32:
        return Tile(16, 32, 128, 4, 6, swap=False) if num_rows <= 4 else Tile(16, 128, 128, 4, 4, swap=True)
    if num_in > 8192:
        return Tile(16, 32, 256, 4, 6, swap=False, prefetch=256 if num_rows <= 4 else 1024)
    if num_out <= 4096 and num_rows <= 4:  # the product after attention, which reads while weights would
        return Tile(16, 64, 128, 4, 6, swap=True)
    return Tile(16, 64, 128, 4, 6, swap=True, prefetch=256)


def _tile_of_few_columns(num_rows: int, num_out: int, num_in: int) -> Tile:
    """Narrow tiles, or most processors would have none; all of the weight, if may be, asked for ahead."""
    if num_rows <= 16:
        if num_in % 256:
            return Tile(16, 16, 128, 4, 5, swap=False, prefetch=256)
        if num_in > 2048 and num_in % 512 == 0:
            return Tile(16, 16, 512, 4, 5, swap=False, prefetch=2048)
        return Tile(16, 16, 256, 4, 8, swap=False, prefetch=_ahead(num_in))
    if num_rows <= 64:
        return Tile(16, 64, 128, 4, 8, swap=True, prefetch=_ahead(num_in))
    columns, depth = (16 if num_out <= 1024 else 32), (128 if num_in % 256 else 256)
    return Tile(64, columns, depth, 4, 5, swap=False, prefetch=_ahead(num_in))


def _tile_of_small(num_rows: int, num_out: int, num_in: int, *, gated: bool) -> Tile:
    if num_rows > 64:
        return Tile(64, 64, 128, 4, 4 if gated else 5, swap=False, prefetch=256)
    if num_rows > 16:
        return Tile(64, 32, 128, 4, 5 if gated else 6, swap=False, prefetch=_ahead(num_in))
    if num_out >= 4096:
        return Tile(16, 64, 128, 4, 6, swap=True)
    return Tile(16, 16 if num_out <= 2048 else 32, 128, 4, 8, swap=False, prefetch=_ahead(num_in))


def _ahead(num_in: int) -> int:
    """Columns of a small weight that are asked for ahead."""
    return 2048 if num_in >= 2048 else 1024 if num_in >= 1024 else 256


def _launch(
    tile: Tile,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    *,
    gate: Activation | None = None,
) -> None:
    assert residual is None or residual.is_contiguous()
    limit = limits(x.device)
    num_rows, num_out = y.shape
    num_in = x.shape[1]
    linear_kernel[(triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, tile.columns),)](
        *(x, weight, weight if bias is None else bias, y if residual is None else residual),
        *(y, num_rows, x.stride(0)),
        NUM_OUT=num_out,
        NUM_IN=num_in,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        GATED=gate is not None,
        GELU=gate is Activation.GELU_TANH,
        HAS_BIAS=bias is not None,
        ADD=residual is not None,
        SWAP=tile.swap,
        PREFETCH=tile.prefetch if limit.dependent and num_in >= tile.prefetch else 0,
        PDL=limit.dependent,
        num_warps=tile.warps,
        num_stages=fitting_stages(tile, limit, x.element_size(), gated=gate is not None),
        **limit.options,
    )


def fitting_stages(tile: Tile, limit: Limits, element_size: int, *, gated: bool) -> int:
    """As many stages as the tile asks for and shared memory holds, with 8 KiB left for the epilogue."""
    stage = (tile.rows + tile.columns * (2 if gated else 1)) * tile.depth * element_size
    return max(1, min(tile.stages, (limit.shared_memory - 8192) // stage))
