"""CUDA graphs of steps: forward and sampler apart, for a number of layouts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from engine.device.staging import Layout

#: Tokens of graphs in whose attention all is items of short tiles, which share long contexts out. 16, since the end of
#: a prompt that is cached up to its last block has no more, and products of 64 rows take an 8B model's layer 16 to 25
#: us longer.
_ITEMS_SIZES = (16, 32, 64, 128, 256, 512)

#: Of those in which all is tiles of long chunks: by 128, the rows of a tile of the library's products. 1024 take an 8B
#: model's device 22 ms, and the host 16 to 26 where it launches each kernel. None of these has items too.
_TILES_SIZES = (640, 768, 896, 1024)

#: Of those with chunks of both kinds beside single tokens, for what has no room in the others: 256 to 768 tokens
#: without contexts take an 8B model's device 8 to 18 ms, and the host 12 to 33 where it launches each kernel.
_MIXED_SIZES = (128, 192, 256, 384, 512, 640, 768)
_MOST_SINGLE = 256

#: Tiles of short chunks, and sampled rows of chunks, that these have room for. A server whose 256 clients ask for 128
#: tokens gets two new prompts a step; programs that find none end at once.
_MIXED_ITEMS = 32

#: Programs of a group of heads that tiles with long contexts may have beside one each. A prompt whose end alone is not
#: cached gets 33 of them for 8 groups: two a multiprocessor.
SPARE_ITEMS = 32

#: Tiles of long chunks that a graph has beside full ones. Each chunk may need one, of which half a tile on average is
#: full, and 31 are the most that are long in 1024 tokens of an 8B model.
SPARE_TILES = 16


@dataclass(frozen=True, slots=True, eq=False)
class StepGraph:
    """Two graphs to be replayed in turn, and where their results lie until the next replay of any.

    They are apart so that logits can be changed, or a mask arrive, in between. `logits` float32
    [num_sampled, vocab_size], whose memory other graphs use too, `ids` int32 [num_sampled].
    """

    forward: torch.cuda.CUDAGraph
    sampler: torch.cuda.CUDAGraph
    logits: Tensor
    ids: Tensor


def decode_layouts(max_num_seqs: int) -> list[Layout]:
    """Steps of single tokens, all sampled: powers of two, steps of 8 up to 64, of 16 up to 256, of 64 beyond."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 64)}
    return [Layout(size, size) for size in sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})]


def chunk_layouts(max_num_seqs: int, max_num_tokens: int, short_tile: int, long_tile: int) -> list[Layout]:
    """Steps with chunks, whose hundreds of launches may take the host longer than the device. First, by their tokens,
    those in which all is alike: items share a long context behind a short chunk out, and fewer rows are sampled. Then
    those for single tokens beside chunks. `short_tile` and `long_tile` are the tokens of a tile of a short chunk and of
    a long one.

    Where there are tiles of long chunks, the last layer is that of the sampled rows alone.
    """
    most_rows = min(64, max_num_seqs)
    layouts = []
    for size in _ITEMS_SIZES:
        rows = min(size, most_rows)
        layouts.append(Layout(size, rows, num_items=size // short_tile + rows + SPARE_ITEMS))
    for size in _TILES_SIZES:
        layouts.append(Layout(size, most_rows, size // long_tile + SPARE_TILES, 0, most_rows + SPARE_ITEMS))
    for size in _MIXED_SIZES:
        rows = min(size, max_num_seqs, _MOST_SINGLE)
        if max_num_seqs > 1 and (rows > most_rows or size > _ITEMS_SIZES[-1]):
            layouts.append(Layout(size, rows, size // long_tile + SPARE_TILES, _MIXED_ITEMS, _MIXED_ITEMS, rows))
    return [layout for layout in layouts if layout.num_tokens <= max_num_tokens]


def capture(
    layouts: Sequence[Layout],
    forward: Callable[[Layout], Tensor],
    sample: Callable[[Layout, Tensor], Tensor],
) -> dict[Layout, StepGraph]:
    """`forward(layout)` answers logits, `sample(layout, logits)` ids; both are run once before they are captured.

    The largest is captured first, so that the smaller ones find room in its memory.
    """

    def run_all() -> None:
        for layout in layouts:
            sample(layout, forward(layout))

    kernels.compile_ahead(run_all)
    graphs: dict[Layout, StepGraph] = {}
    pool = torch.cuda.graph_pool_handle()
    gc.collect()
    stream = torch.cuda.Stream()  # one: the library keeps memory for each that it is called on
    for layout in sorted(layouts, key=lambda layout: layout.num_tokens, reverse=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            sample(layout, forward(layout))  # warms up the libraries
        torch.cuda.current_stream().wait_stream(stream)
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(first, pool=pool):
            logits = forward(layout)
        with torch.cuda.graph(second, pool=pool):
            ids = sample(layout, logits)
        # The tensor itself would keep its memory from the other graphs: 131 MB for 256 rows of Llama 3's vocabulary.
        graphs[layout] = StepGraph(first, second, torch.as_tensor(_Lent(logits), device=logits.device), ids)
        del logits
    return graphs


class _Lent:
    """A float32 tensor's memory as `torch.as_tensor` takes it, without the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.dtype == torch.float32
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "typestr": "<f4",
            "version": 3,
        }
